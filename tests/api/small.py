"""A model, rows and settings with which a call of `whet` takes seconds."""

from __future__ import annotations

from typing import Any

from tests.e2e.tiny_run import QUESTIONS

ROWS = [{"prompt": question, "label": str(i)} for i, question in enumerate(QUESTIONS)]
SMALL: dict[str, Any] = {
    "num_rollouts": 2,
    "deterministic": True,
    "batch": {"prompts_per_rollout": 2, "samples_per_prompt": 3},
    "rollout": {"max_turn_tokens": 8, "max_tokens": 400},
    "train__optim__lr": 1e-2,
    "observe__display": "none",
}


def score(trajectory):
    """A reward that varies whatever the model writes."""
    return len(trajectory.response) % 7 / 7
