"""Processes that compute every step of one engine together, as its core sees them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from whet.engine.embedded.logits import Drawn
from whet.model.causal import CausalModel
from whet.model.digest import digests_of


class Lockstep(Protocol):
    """Those that compute every step of a core together, as the core sees them."""

    def tell(self, what: str, *arguments: object) -> None:
        """Have the others do to their cores what is now done to this one: a method's name and what it is given."""
        ...

    def drawn(self, draw: Callable[[], list[Drawn]]) -> list[Drawn]:
        """What a step draws: found by the first, told the others."""
        ...

    def digests(self, model: CausalModel) -> dict[str, str]:
        """Of each whole tensor that the model holds, put together from its parts; of one that a rank holds otherwise, that rank's."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """What is computed inside is computed by all; one that cannot go on ends, so that no other waits for it or computes without it.

        What is wrong with a request or with numbers is raised, since it is found where all have computed the same.
        """
        ...


class SingleProcess:
    """One process."""

    def tell(self, what: str, *arguments: object) -> None:
        pass

    def drawn(self, draw: Callable[[], list[Drawn]]) -> list[Drawn]:
        return draw()

    def digests(self, model: CausalModel) -> dict[str, str]:
        return digests_of(model.named_state())

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()
