"""Decode steps of fixed shapes, over tensors that stay where they are: on CUDA each is captured as a graph once and replayed from then on.

A step is padded to a power of two in sequences and in blocks. What pads it is its first sequence again, which writes the same key and value
to the same place, so a padded step writes nothing that the step itself does not.

On a CPU the same steps are computed without capture; capture itself has never been run on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from whet.engine.embedded.cache import KVStore
from whet.engine.embedded.paged import PaddedRows, decode_attention
from whet.engine.embedded.rows import block_tables
from whet.engine.embedded.scheduler import Sequence
from whet.model.causal import CausalModel

CAPTURING = threading.Lock()
"""Lock of graph capture: one at a time in a process, over all engines."""


class StaticDecode:
    """The decode steps of a model, each made on first use.

    Args:
        model: its weights are read in place; `begin_version` is called after an update.
        store: the block cache.
    """

    def __init__(self, model: CausalModel, store: KVStore) -> None:
        self._model, self._store = model, store
        self._steps: dict[tuple[int, int], _Step] = {}
        self._read = self._addresses()

    def hidden(self, sequences: Seq[Sequence]) -> Tensor:
        """Final hidden states of each sequence's first token that is not cached; its key and value go to its blocks. [B, H], valid until
        the next step."""
        longest = max(len(s.blocks) for s in sequences)
        shape = _padded(len(sequences)), min(_padded(longest), self._store.num_blocks)
        step = self._steps.get(shape)
        if step is None:
            step = self._steps[shape] = _Step(self._model, self._store, *shape)
        step.fill(sequences)
        return step.run()[: len(sequences)]

    def begin_version(self) -> None:
        """Called after the weights changed: graphs that would read old addresses are captured again."""
        addresses = self._addresses()
        if addresses != self._read:
            self._read = addresses
            self.forget()

    def forget(self) -> None:
        """The store gives its tensors up: graphs read them, and have memory of their own."""
        self._steps.clear()

    def _addresses(self) -> list[int]:
        return [tensor.data_ptr() for _, tensor in self._model.named_state()]


class _Step:
    """One shape.

    Args:
        model: computes it.
        store: the block cache that it reads and writes.
        num: sequences.
        num_blocks: blocks of each of them.
    """

    def __init__(self, model: CausalModel, store: KVStore, num: int, num_blocks: int) -> None:
        self._model, self._store = model, store
        device = model.device
        self._inputs = torch.zeros(3, num, dtype=torch.int64, device=device)
        """Tokens, positions and slots. [3, B]"""
        self._tables = torch.zeros(num, num_blocks, dtype=torch.int64, device=device)
        self._places = torch.arange(num_blocks * store.block_size, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Tensor | None = None

    def fill(self, sequences: Seq[Sequence]) -> None:
        """Say what is to be computed."""
        num, num_blocks = self._tables.shape
        padded = [*sequences, *[sequences[0]] * (num - len(sequences))]
        size = self._store.block_size
        places = [s.num_cached_tokens for s in padded]
        columns = [(s.tokens[at], at, s.blocks[at // size] * size + at % size) for s, at in zip(padded, places, strict=True)]
        self._inputs.copy_(torch.from_numpy(np.array(columns, dtype=np.int64).T.copy()))
        self._tables.copy_(torch.from_numpy(block_tables(padded, num_blocks)))

    def run(self) -> Tensor:
        """Compute it. [B, H]"""
        if self._inputs.device.type != "cuda":
            return self._compute()
        with torch.cuda.device(self._inputs.device):  # streams and graphs are of the present one, which is each thread's own
            if self._graph is None:
                self._capture()
            assert self._graph is not None and self._out is not None
            self._graph.replay()
        return self._out

    def _capture(self) -> None:
        """Compute once, so that everything made on the first call exists, then record. The replay
        writes the same tensors."""
        with CAPTURING:
            warmup_stream = torch.cuda.Stream()
            warmup_stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(warmup_stream):
                self._compute()
            torch.cuda.current_stream().wait_stream(warmup_stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: a trainer's thread may wait for its own work meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._out = self._compute()
        self._graph = graph

    def _compute(self) -> Tensor:
        tokens, positions, slots = self._inputs.unbind()
        visible = self._places <= positions[:, None, None, None]
        rows = PaddedRows(0, len(tokens), self._tables, visible, None, None)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            self._store.write(layer, slots, k, v)
            keys, values = self._store.gathered(layer, self._tables)
            return decode_attention(q, keys, values, rows, scale)

        return self._model.hidden(tokens, positions, attend)


def _padded(num: int) -> int:
    """The next power of two."""
    return 1 << (num - 1).bit_length()
