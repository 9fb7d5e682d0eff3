"""The reward `reasoning_gym`: an answer scored by the verifier of the generator that asked."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module
from typing import Any

from whet.config import Config
from whet.reward.base import bad_row
from whet.types import Rewards, Trajectory

SCORE_REASONING = "whet.reward.reasoning_gym:score"


class ReasoningGymOptions(Config):
    """Options of the reward `reasoning_gym`."""

    tag: str = "answer"
    """The answer is in the last `<tag>...</tag>` of the reply; a reply without one is the answer as a whole. "": always the whole."""


def score(trajectory: Trajectory, tag: str = "answer") -> Rewards:
    """Score the reply with the generator's own verifier, from 0 to 1."""
    asked: Any = trajectory.task.metadata.get("reasoning_gym")
    if not isinstance(asked, dict):
        raise bad_row(trajectory.task, 'has no metadata "reasoning_gym"; its tasks come from data.source = "reasoning_gym"')
    response = trajectory.response
    found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL) if tag else []
    dataset = _dataset(asked["dataset"], asked["seed"], asked["size"], tuple(sorted(asked["config"].items())))
    return Rewards(float(dataset.score_answer((found[-1] if found else response).strip(), dataset[asked["index"]])))


@lru_cache(maxsize=64)
def _dataset(name: str, seed: int, size: int, config: tuple[tuple[str, Any], ...]) -> Any:
    return import_module("reasoning_gym").create_dataset(name, seed=seed, size=size, **dict(config))
