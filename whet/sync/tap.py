"""The trainer's side of a proof, found as its weights pass by."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from torch import Tensor

from whet.model.digest import digests_of
from whet.transport.base import Stream


class Tap(Stream):
    """A stream of weights that takes the digest of each before anybody else sees it, so that they are put together only once.

    Args:
        weights: the trainer's.
    """

    def __init__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().__init__(self._digested(iter(weights)))
        self.digests: dict[str, str] = {}
        self.gather_s, self.digest_s = 0.0, 0.0
        """Seconds of putting tensors together, and of their digests."""

    def finish(self) -> dict[str, str]:
        """Read on to the end, whoever stopped before it; the digests of all."""
        for _ in self:
            pass
        return self.digests

    def _digested(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        while True:
            began = time.perf_counter()
            found = next(weights, None)
            gathered = time.perf_counter()
            self.gather_s += gathered - began
            if found is None:
                return
            self.digests |= digests_of([found])
            self.digest_s += time.perf_counter() - gathered
            yield found
