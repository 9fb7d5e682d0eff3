"""The reward `rubric`: a judge model rates a reply against each criterion of its task (as Step-DeepResearch, arXiv 2512.20491, does)."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, ValidationError

from whet.config import Config
from whet.env.http import JsonClient, Retries, bearer
from whet.reward.base import RewardError, RewardTimeout, bad_row, call_name
from whet.reward.judge import Grade, JudgeRequest, chat_payload, read_grades
from whet.types import Rewards, Task, Trajectory

Mapping = Literal["strict", "lenient", "graded"]

MAPPINGS: dict[Mapping, dict[bool, dict[Grade, float]]] = {
    "strict": {True: {"fully": 1.0, "partly": 0.0, "not": 0.0}, False: {"fully": 1.0, "partly": 1.0, "not": 0.0}},
    "lenient": {True: {"fully": 1.0, "partly": 1.0, "not": 0.0}, False: {"fully": 1.0, "partly": 0.0, "not": 0.0}},
    "graded": {True: {"fully": 1.0, "partly": 0.5, "not": 0.0}, False: {"fully": 1.0, "partly": 0.5, "not": 0.0}},
}
"""Share of its weight that a criterion counts: by mapping, sign of the weight (True: positive), and
grade."""


class Criterion(Config):
    """A property of a good reply (positive weight) or of a bad one (negative weight)."""

    text: str = Field(min_length=1)
    weight: float = Field(default=1.0, allow_inf_nan=False)
    name: str | None = None
    """Name of its component; unset: `criterion_1` and so on."""


class RubricOptions(Config):
    """Options of the reward `rubric`."""

    base_url: str
    """Base URL of an OpenAI-compatible server, for example http:
    127.0.0.1:8000/v1.
    """
    model: str
    """The judge's name there."""
    api_key_env: str | None = None
    """Environment variable with the key."""
    mapping: Mapping = "strict"
    """strict: a positive criterion counts if it is fully satisfied, a negative one as soon as it is partly; lenient: the other way round;
    graded: partly counts half."""
    criteria_key: str = "criteria"
    """Metadata key of a task's criteria: a list of { text, weight, name }."""
    attempts: int = Field(default=4, ge=1)
    """Tries until the judge counts as failed; each has reward.timeout_s."""
    backoff_s: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Wait before the second try; doubled each time up to 30 s, with up to as much again by chance."""
    max_concurrent: int = Field(default=16, ge=1)
    """Requests under way at once."""
    max_tokens: int = Field(default=2048, ge=1)
    """Length limit of the judge's answer in tokens."""
    temperature: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """The judge's."""


class RubricReward:
    """The sum of the weights of the criteria that a judge finds satisfied, by the mapping.

    The judge rates each criterion as fully, partly or not satisfied; its answer has to be a JSON object or labelled lines, one grade for
    each criterion, and is never evaluated. A judge that fails or answers otherwise is asked again; then it is a `RewardError` or a
    `RewardTimeout`, never a 0. Each criterion's share (0 to 1, before its weight) is a component.
    """

    def __init__(self, options: RubricOptions, timeout_s: float) -> None:
        self._options = options
        url = options.base_url.rstrip("/") + "/chat/completions"
        key = bearer(options.api_key_env)
        self._client = JsonClient(url, timeout_s, options.max_concurrent, key, failed=RewardError, late=RewardTimeout)
        self._retries = Retries(options.attempts, options.backoff_s)

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        task, options = trajectory.task, self._options
        criteria = read_criteria(task, options.criteria_key)
        request = JudgeRequest(task.prompt, trajectory.response, tuple(criterion.text for criterion in criteria))
        payload = chat_payload(request, options.model, options.temperature, options.max_tokens)
        name = call_name("rubric", task)
        grades = await self._client.post(payload, lambda answer: read_grades(answer, len(criteria)), self._retries, name)
        return score_rubric(criteria, grades, options.mapping)

    def close(self) -> None:
        """Cut the requests that are under way."""
        self._client.close()


def score_rubric(criteria: list[Criterion], grades: list[Grade], mapping: Mapping) -> Rewards:
    """The weighted sum of what each criterion counts."""
    shares = [MAPPINGS[mapping][criterion.weight >= 0][grade] for criterion, grade in zip(criteria, grades, strict=True)]
    names = [criterion.name or f"criterion_{place}" for place, criterion in enumerate(criteria, start=1)]
    total = math.fsum(criterion.weight * share for criterion, share in zip(criteria, shares, strict=True))
    graded = "; ".join(f"{name}: {grade}" for name, grade in zip(names, grades, strict=True))
    return Rewards(total, dict(zip(names, shares, strict=True)), graded)


def read_criteria(task: Task, key: str) -> list[Criterion]:
    """A task's criteria. Raises LabelError if it has none, or they are not of the form."""
    value = task.metadata.get(key)
    if not isinstance(value, list) or not value:
        raise bad_row(task, f'has no metadata.{key}; the reward rubric needs a list of {{"text": ..., "weight": ...}}')
    criteria: list[Criterion] = []
    for place, item in enumerate(value):
        try:
            criteria.append(Criterion.model_validate(item))
        except ValidationError as error:
            fault = error.errors()[0]
            where = ".".join(map(str, (key, place, *fault["loc"])))
            raise bad_row(task, f"has a criterion that cannot be used: metadata.{where}: {fault['msg']}") from None
    names = [criterion.name for criterion in criteria if criterion.name]
    if len(set(names)) < len(names):
        raise bad_row(task, f"has two criteria of one name in metadata.{key}: {names}")
    return criteria
