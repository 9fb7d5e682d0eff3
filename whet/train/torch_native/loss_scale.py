"""The factor of a loss whose gradients are computed in float16."""

from __future__ import annotations

from whet.types import JSON

FIRST, SEARCH, BACKOFF = 2.0**32, 16.0, 2.0
"""The first factor; what it is divided by at each overflow until a step has succeeded, and afterwards."""
GROWTH_STEPS = 1000
"""Steps without an overflow after which the factor is doubled."""


class LossScale:
    """A power of two that keeps small gradients above float16's least number, and large ones below its greatest
    (Micikevicius et al., arXiv 1710.03740).

    Gradients are divided by it in float32, which changes no bit of them.
    """

    def __init__(self) -> None:
        self.value = FIRST
        self._steps, self._settled = 0, False

    def lower(self) -> bool:
        """After an overflow: a smaller factor. False if there is none, so that the gradients themselves are not finite."""
        if self.value <= 1.0:
            return False
        self.value = max(self.value / (BACKOFF if self._settled else SEARCH), 1.0)
        self._steps = 0
        return True

    def succeed(self) -> None:
        """After a step with finite gradients."""
        self._settled = True
        self._steps += 1
        if self._steps == GROWTH_STEPS:
            self.value, self._steps = self.value * 2, 0

    def state(self) -> JSON:
        """Content of a checkpoint."""
        return {"value": self.value, "steps": self._steps, "settled": self._settled}

    def load(self, state: JSON) -> None:
        """Take over what `state` gave. None, of a run in another dtype: the search begins again."""
        found = LossScale().state() if state is None else state
        self.value, self._steps, self._settled = found["value"], found["steps"], found["settled"]
