"""The reward `exact`: 1 if the reply's answer is the task's label, as text."""

from __future__ import annotations

from whet.config import Config
from whet.reward.base import label_of
from whet.reward.math.extract import Extract, extract_answer
from whet.types import Rewards, Trajectory


class ExactOptions(Config):
    """Options of the reward `exact`."""

    extract: Extract = "whole"
    """Place of the answer in the reply (see the reward math)."""
    casefold: bool = False
    """Upper and lower case are the same."""
    collapse_whitespace: bool = False
    """Any run of white space is one space."""


class ExactReward:
    """Compares text; white space around it never counts. A task without a label is a `LabelError`."""

    def __init__(self, options: ExactOptions) -> None:
        self._options = options

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        label = label_of(trajectory.task, "exact")
        answer = extract_answer(trajectory.response, self._options.extract)
        if answer is None:
            return Rewards(0.0, detail=f"the reply has no answer (extract = {self._options.extract})")
        label, answer = self._normalise(label), self._normalise(answer)
        if label == answer:
            return Rewards(1.0)
        return Rewards(0.0, detail=f"the answer {answer[:200]!r} is not the label {label[:200]!r}")

    def close(self) -> None:
        """Nothing to release."""

    def _normalise(self, text: str) -> str:
        text = " ".join(text.split()) if self._options.collapse_whitespace else text.strip()
        return text.casefold() if self._options.casefold else text
