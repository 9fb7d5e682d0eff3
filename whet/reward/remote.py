"""The reward `remote`: a server of yours scores, over HTTP."""

from __future__ import annotations

from pydantic import Field

from whet.config import Config
from whet.env.http import JsonClient, Retries, bearer
from whet.reward.base import RewardError, RewardTimeout, call_name, read_score
from whet.types import JSON, Rewards, Trajectory


class RemoteOptions(Config):
    """Options of the reward `remote`."""

    url: str
    """Address to POST to, for example http:
    127.0.0.1:8000/score.
    """
    score_key: str | None = None
    """If the answer is an object: which of its numbers is the reward, the others are components; unset: `total`, else their sum."""
    attempts: int = Field(default=10, ge=1)
    """Tries until a request counts as failed; each has reward.timeout_s."""
    backoff_s: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Wait before the second try; doubled each time up to 30 s, with up to as much again by chance."""
    max_concurrent: int = Field(default=64, ge=1)
    """Requests under way at once."""
    api_key_env: str | None = None
    """Environment variable with a key, sent as a bearer token."""


class RemoteReward:
    """POSTs `{"prompt", "response", "label", "metadata"}` and takes the answer's JSON as the reward: a number, or an object of numbers.

    `prompt` is the task's text or messages. The rule of slime's `remote_rm`. A server that fails, hangs or answers nonsense is asked again;
    then it is a `RewardError` or a `RewardTimeout`, never a 0. A refusal (status 400 to 499, save 408, 409, 425, 429) is final at once.
    """

    def __init__(self, options: RemoteOptions, timeout_s: float) -> None:
        self._options = options
        self._client = JsonClient(
            options.url, timeout_s, options.max_concurrent, bearer(options.api_key_env), failed=RewardError, late=RewardTimeout
        )
        self._retries = Retries(options.attempts, options.backoff_s)

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        task = trajectory.task
        payload = {
            "prompt": task.prompt if isinstance(task.prompt, str) else [message.to_dict() for message in task.prompt],
            "response": trajectory.response,
            "label": task.label,
            "metadata": dict(task.metadata),
        }
        return await self._client.post(payload, self._read, self._retries, call_name("remote", task))

    def close(self) -> None:
        """Cut the requests that are under way."""
        self._client.close()

    def _read(self, answer: JSON) -> Rewards:
        key = self._options.score_key
        if not isinstance(answer, dict) or key is None:
            return read_score(answer)
        if key not in answer:
            raise ValueError(f"it has no {key!r} (score_key), only {', '.join(map(str, answer))}")
        numbers = {name: value for name, value in answer.items() if isinstance(value, int | float)}
        return read_score({**{name: value for name, value in numbers.items() if name != "total"}, "total": answer[key]})
