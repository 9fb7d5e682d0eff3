"""Playing tasks: groups of trajectories with their rewards, for training and evaluation alike."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from whet.config import Config
from whet.data.template import Renderer
from whet.engine.base import Engine
from whet.env.base import Env
from whet.env.failure import failure_of
from whet.env.rollout import Deadline, Limits, run_trajectory
from whet.reward.base import LabelError, Reward, RewardTimeout, place_token_rewards, read_score
from whet.types import Group, Outcome, SamplingParams, Task, Trajectory


class RolloutConfig(Config):
    """How the policy is sampled from, and where a trajectory is cut."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Of every turn; 0 is greedy (evaluation only)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens that have this probability together. In training the ids of those tokens are recorded with every
    sampled one, and all log-probs are renormalised over them; with `top_k` there are never more than that."""
    top_k: int = Field(default=0, ge=0)
    """Sample from so many most likely tokens, 0: from all. Recorded in training as for `top_p`."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens less likely than this fraction of the most likely one; other than 0 in evaluation only."""
    repetition_penalty: float = Field(default=1.0, ge=0.1, le=10)
    """Make tokens of the context and the reply less likely, by this factor on their logits; other than 1 in evaluation
    only."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken from the logit of each token that the turn has already; other than 0 in evaluation only."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Taken from a token's logit for each time that the turn has it already; other than 0 in evaluation only."""
    min_tokens: int = Field(default=0, ge=0)
    """Tokens of a turn before it may end by itself; other than 0 in evaluation only."""
    max_turns: int = Field(default=8, ge=1)
    """Model calls of a trajectory. A plain question ends after one by itself."""
    max_tokens: int = Field(default=4096, ge=2)
    """Tokens of a whole trajectory: prompt, replies and the environment's answers."""
    max_turn_tokens: int = Field(default=1024, ge=1)
    """Tokens sampled in one turn."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a turn besides the tokenizer's own; they stay in the turn."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Texts that end a turn, such as `</search>`; they stay in the turn, to the end of the token that completes one."""
    timeout_s: float | None = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds that a trajectory may take, from its start to its reward, waiting for the engine included. none: any
    time."""

    def sampling(self, stop_token_ids: Sequence[int]) -> SamplingParams:
        """For the engine. `stop_token_ids` are the tokenizer's (`Renderer.stop_token_ids`)."""
        return SamplingParams(
            max_tokens=self.max_turn_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(dict.fromkeys((*stop_token_ids, *self.stop_token_ids))),
            stop=tuple(self.stop),
        )

    def limits(self) -> Limits:
        return Limits(self.max_turns, self.max_tokens, self.max_turn_tokens)


UNREPLAYED = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
"""Keys whose every value but the default makes the engine draw from a distribution that the trainer does not compute."""


def check_trainable(config: RolloutConfig) -> None:
    """Refuse what training cannot replay: it needs the log-prob of a token under the distribution that it was sampled
    from.

    Raises:
        ValueError: naming the key, why, and what to set.
    """
    if config.temperature == 0:
        raise ValueError(
            "rollout.temperature=0 cannot be trained on: greedy samples of a task are all the same, and their log-probs "
            "are 0; set it above 0 (1.0 samples from the policy itself), and temperature=0 for evaluation alone"
        )
    for key in UNREPLAYED:
        value, whole = getattr(config, key), RolloutConfig.model_fields[key].default
        if value != whole:
            raise ValueError(
                f"rollout.{key}={value} cannot be trained on: tokens would be drawn from another distribution than the policy, which "
                f"the trainer does not compute; set rollout.{key}={whole}, and {key}={value} for evaluation alone"
            )


class Stalled(RuntimeError):
    """In deterministic mode something took longer than its limit: an outcome that hangs on time would not be the same again."""

    def __init__(self, trajectory: Trajectory) -> None:
        error = trajectory.error
        why = "" if error is None else f" in {error.where}: {error.message}"
        super().__init__(
            f"trajectory {trajectory.id} was too slow{why}; with deterministic=true no outcome may depend on time, so the run stops: "
            "mend what hangs, raise its limit (env.tool_timeout_s, reward.timeout_s, rollout.timeout_s), or set deterministic=false to "
            "count such trajectories as timeouts"
        )


GREEDY = "greedy"
"""Stands in a greedy trajectory's id where a sampled one has its number."""


def greedily(sampling: SamplingParams) -> SamplingParams:
    """The most likely token every time; nothing of it is trained on, so nothing need be replayed."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, nucleus=False)


@dataclass(frozen=True, slots=True)
class _Game:
    """One trajectory that is to be played."""

    id: str
    task: Task
    sampling: SamplingParams
    rank: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Player:
    """Everything that playing a task takes."""

    engine: Engine
    renderer: Renderer
    make_env: Callable[[], Env]
    reward: Reward
    sampling: SamplingParams
    limits: Limits
    timeout_s: float | None
    """Seconds that one trajectory may take, engine and reward included; then it is a timeout. None: any time."""
    max_in_flight: int | None = None
    """Trajectories under way at a time; a later one's time begins when it is started. None: all at once."""
    deterministic: bool = False
    """No outcome may depend on how long anything took: `timeout_s` bounds each wait for the environment and the reward alone, and a limit
    that runs out stops the rollout."""

    async def play(
        self,
        tasks: Sequence[Task],
        samples_per_prompt: int,
        seed: int,
        ended: dict[str, Trajectory] | None = None,
        baseline: bool = False,
    ) -> list[Group]:
        """Play every task `samples_per_prompt` times; the engine decides how many of those in flight run together.

        Args:
            tasks: with unique ids.
            samples_per_prompt: trajectories of each.
            seed: with the task's id and the sample's index it seeds the sampling.
            ended: trajectories of these tasks that were played already, by id: they are not played again. Each one that ends is put there,
                so that this still holds them if the rest is cancelled.
            baseline: play every task once more, greedily: its group's `baseline`, with the environment, limits and reward of the others.

        Returns:
            One group per task, in the order of the tasks. A trajectory that failed is in it, with its outcome.

        Raises:
            ValueError: two tasks have the same id, or there is nothing to play.
            LabelError: the reward cannot use a task's label. The data are wrong, so nothing is played on.
            Stalled: in deterministic mode, something took longer than its limit.
        """
        if len({task.id for task in tasks}) != len(tasks):
            raise ValueError("the tasks of one rollout must have different ids")
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt must be at least 1, not {samples_per_prompt}")
        games = [game for i, task in enumerate(tasks) for game in self._games(task, i, samples_per_prompt, seed, baseline)]
        slots = asyncio.Semaphore(min(self.max_in_flight or len(games), len(games)) or 1)
        ended = {} if ended is None else ended
        await _all([self._one(game, slots, ended) for game in games if game.id not in ended])
        return [
            Group(
                task,
                tuple(ended[_id(task, k)] for k in range(samples_per_prompt)),
                ended[_id(task, GREEDY)] if baseline else None,
            )
            for task in tasks
        ]

    def _games(self, task: Task, index: int, samples_per_prompt: int, seed: int, baseline: bool) -> list[_Game]:
        """A task's trajectories. The greedy one comes last: then its prompt is in the engine's cache."""
        games = [
            _Game(_id(task, k), task, replace(self.sampling, seed=seed_of(seed, task.id, k)), (index, k))
            for k in range(samples_per_prompt)
        ]
        greedy = _Game(_id(task, GREEDY), task, greedily(self.sampling), (index, samples_per_prompt))
        return [*games, greedy] if baseline else games

    async def _one(self, game: _Game, slots: asyncio.Semaphore, ended: dict[str, Trajectory]) -> None:
        async with slots:
            deadline = Deadline.after(self.timeout_s, per_wait=self.deterministic)
            trajectory = await run_trajectory(
                trajectory_id=game.id,
                task=game.task,
                env=self.make_env(),
                engine=self.engine,
                renderer=self.renderer,
                sampling=game.sampling,
                limits=self.limits,
                rank=game.rank,
                deadline=deadline,
            )
            if trajectory.outcome.valid:
                trajectory = await self._judge(trajectory, deadline)
        if self.deterministic and trajectory.outcome is Outcome.TIMEOUT:
            raise Stalled(trajectory)
        ended[trajectory.id] = trajectory

    async def _judge(self, trajectory: Trajectory, deadline: Deadline) -> Trajectory:
        """Add the rewards. A reward that fails is an outcome, never a 0."""
        began = time.monotonic()
        try:
            async with deadline.ends("the reward"):
                trajectory, rewards = place_token_rewards(trajectory, read_score(await self.reward(trajectory)))
        except LabelError:
            raise
        except (RewardTimeout, TimeoutError) as late:
            outcome, rewards, error = Outcome.TIMEOUT, None, failure_of(late, "reward")
        except Exception as fault:  # the rollout boundary
            outcome, rewards, error = Outcome.REWARD_ERROR, None, failure_of(fault, "reward")
        else:
            outcome, error = trajectory.outcome, None
        timings = {**trajectory.timings, "reward": time.monotonic() - began}
        return replace(trajectory, outcome=outcome, rewards=rewards, error=error, timings=timings)


def seed_of(seed: int, task_id: str, k: int) -> int:
    """The seed of one trajectory: 63 bits of a hash, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}/{task_id}/{k}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _id(task: Task, k: int | str) -> str:
    """Of a task's k-th trajectory, or of its greedy one."""
    return f"{task.id}/{k}"


async def _all(jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run them. When one raises, or this is cancelled, the others are cancelled and have ended before it does."""
    running = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
