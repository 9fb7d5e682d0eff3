"""Experts that an engine's tokens go to, kept next to the cached keys and values that were computed with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor

from whet.engine.embedded.scheduler import Sequence
from whet.model.causal import CausalModel
from whet.model.routing import Routers
from whet.types.routes import Routes, entry_bytes

KEY = "a request for experts"


class StepRoutes:
    """The experts of every token in the cache, by its slot.

    A sequence has those that its tokens were first computed with: what is computed again after a preemption or an update may round
    otherwise, and the tokens that were sampled by then came of the first.

    Args:
        model: a mixture of experts.
        num_slots: tokens of the cache.
        block_size: tokens of a block.

    Raises:
        ValueError: as `Routers`.
    """

    def __init__(self, model: CausalModel, num_slots: int, block_size: int) -> None:
        self._routers = Routers(model.hf, KEY)
        self._layers, self._top_k = len(self._routers.layers), self._routers.top_k
        self._itemsize, self._block_size = entry_bytes(self._routers.num_experts), block_size
        width = self._layers * self._top_k * self._itemsize
        self._slots: Any = np.zeros((num_slots, width), np.uint8)

    def computed(self, plan: Iterable[tuple[Sequence, int]], compute: Callable[[], Tensor]) -> Tensor:
        """Make a pass over the planned tokens, in their order, and note their experts."""
        with self._routers.watched() as seen:
            hidden = compute()
        rows = seen.routes().cpu().numpy()
        rows = rows.reshape(len(rows), -1).view(np.uint8)
        done = 0
        for sequence, new in plan:
            self._note(sequence, rows[done : done + new])
            done += new
        return hidden

    def copy_block(self, source: int, target: int) -> None:
        """Called with each copy of a block."""
        blocks = self._slots.reshape(-1, self._block_size, self._slots.shape[1])
        blocks[target] = blocks[source]

    def entries(self, sequence: Sequence, start: int, stop: int) -> Routes:
        """Experts that the predecessors of a sequence's tokens went to, from the token `start` to the one before `stop`."""
        width, unknown = self._slots.shape[1], 1 if start == 0 else 0
        assert len(sequence.routes) >= (stop - 1) * width, "a token was sampled before its predecessor was computed"
        entries = bytes(unknown * width) + sequence.routes[max(start - 1, 0) * width : (stop - 1) * width]
        return Routes(bytes(entries), self._layers, self._top_k, self._itemsize)

    def _note(self, sequence: Sequence, rows: Any) -> None:
        """The experts of a sequence's pending tokens; before the first of them, of those that it found cached."""
        first, width = sequence.num_cached_tokens, self._slots.shape[1]
        self._slots[self._slots_of(sequence, first, first + len(rows))] = rows
        if not sequence.request.sampling.routes:
            return
        known = len(sequence.routes) // width
        if known < first:
            sequence.routes += self._slots[self._slots_of(sequence, known, first)].tobytes()
            known = first
        sequence.routes += rows[known - first :].tobytes()

    def _slots_of(self, sequence: Sequence, start: int, stop: int) -> Any:
        places = np.arange(start, stop)
        return np.array(sequence.blocks)[places // self._block_size] * self._block_size + places % self._block_size
