"""Processes that compute every step of one engine together, as its core sees them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from whet.engine.embedded.logits import Drawn
from whet.model.causal import CausalModel
from whet.model.digest import digests_of


class Lockstep(Protocol):
    """The ranks that compute every step of a core together, as the core sees them."""

    def broadcast(self, method: str, *arguments: object) -> None:
        """Have the other ranks make the call of their cores that this rank makes next."""
        ...

    def drawn(self, draw: Callable[[], list[Drawn]]) -> list[Drawn]:
        """The tokens that a step draws: drawn by rank 0, and sent to the others."""
        ...

    def digests(self, model: CausalModel) -> dict[str, str]:
        """Digest of each full tensor, gathered from its shards. A tensor held in another way is
        digested by its own rank."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Context of a computation of all ranks. A rank that cannot continue ends, so that no other
        waits for it or computes without it.

        Errors of a request or of numbers are raised, since all ranks that compute the same find them.
        """
        ...


class SingleProcess:
    """One process."""

    def broadcast(self, method: str, *arguments: object) -> None:
        pass

    def drawn(self, draw: Callable[[], list[Drawn]]) -> list[Drawn]:
        return draw()

    def digests(self, model: CausalModel) -> dict[str, str]:
        return digests_of(model.named_state())

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()
