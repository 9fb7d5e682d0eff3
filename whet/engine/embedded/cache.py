"""The paged KV cache: blocks with reference counts, and attention that reads and writes them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class OutOfBlocks(Exception):
    """No block is free; the scheduler must evict or preempt."""


class BlockPool:
    """Hands out blocks of cache slots and counts who holds them.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._holders = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """A block with one holder."""
        if not self._free:
            raise OutOfBlocks
        block = self._free.pop()
        self._holders[block] = 1
        return block

    def hold(self, block: int) -> None:
        """One more holder."""
        assert self._holders[block] > 0, f"block {block} is free"
        self._holders[block] += 1

    def drop(self, block: int) -> None:
        """One holder fewer; the last one frees the block."""
        assert self._holders[block] > 0, f"block {block} is free"
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self._free.append(block)

    def shared(self, block: int) -> bool:
        return self._holders[block] > 1


class KVStore:
    """The cached keys and values of every layer, made when a layer first writes, in the shapes that it writes.

    Each layer's tensors are [num_blocks, block_size, kv_heads, D].
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v [T, kv_heads, D] at `slots` [T]; returns the layer's tensors."""
        if layer not in self.layers:
            shape = (self.num_blocks, self.block_size)
            self.layers[layer] = (k.new_zeros(*shape, *k.shape[1:]), v.new_zeros(*shape, *v.shape[1:]))
        keys, values = self.layers[layer]
        keys.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
        values.view(-1, *v.shape[1:]).index_copy_(0, slots, v)
        return keys, values

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in every layer (copy on write)."""
        for keys, values in self.layers.values():
            keys[target].copy_(keys[source])
            values[target].copy_(values[source])

    @property
    def size_bytes(self) -> int:
        return sum(x.nbytes for pair in self.layers.values() for x in pair)

    def clear(self) -> None:
        self.layers.clear()


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences of one step that are attended to together, padded to the longest.

    `queries` is None for decoding, where every sequence has one query and they lie first in the row.
    """

    queries: Tensor | None
    """Row index of each padded query place. [B, Q] int64"""
    blocks: Tensor
    """Block table, padded with block 0. [B, NB] int64"""
    visible: Tensor
    """Which cached tokens each query sees. [B, 1, Q, NB * block_size] bool"""
    place: Tensor | None
    """For each real query, its index among the padded ones. [sum of Q_i] int64"""


class PagedAttend:
    """Attention of one engine step: writes the new keys and values, then reads each sequence's blocks."""

    def __init__(self, store: KVStore, slots: Tensor, num_decode: int, decode: Rows | None, prefill: Rows | None) -> None:
        self._store, self._slots, self._num_decode = store, slots, num_decode
        self._decode, self._prefill = decode, prefill

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        keys, values = self._store.write(layer, self._slots, k, v)
        outs: list[Tensor] = []
        if self._decode is not None:
            outs.append(_decode(q[: self._num_decode], keys, values, self._decode, scale))
        if self._prefill is not None:
            outs.append(_prefill(q, keys, values, self._prefill, scale))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def _read(pool: Tensor, rows: Rows) -> Tensor:
    """Cached entries of each sequence. [B, kv_heads, NB * block_size, D]"""
    num, width = rows.blocks.shape
    picked = pool.index_select(0, rows.blocks.flatten())
    return picked.view(num, width * pool.shape[1], *pool.shape[2:]).transpose(1, 2)


def _decode(q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float) -> Tensor:
    """One query per sequence: the query heads that share a kv head go in as that head's queries."""
    num, heads, dim = q.shape
    kv_heads = keys.shape[2]
    grouped = q.view(num, kv_heads, heads // kv_heads, dim)
    out = F.scaled_dot_product_attention(
        grouped, _read(keys, rows), _read(values, rows), attn_mask=rows.visible, scale=scale
    )
    return out.reshape(num, heads, out.shape[-1])


def _prefill(q: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float) -> Tensor:
    assert rows.queries is not None and rows.place is not None
    num, width = rows.queries.shape
    padded = q.index_select(0, rows.queries.flatten()).view(num, width, *q.shape[1:]).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        padded,
        _read(keys, rows),
        _read(values, rows),
        attn_mask=rows.visible,
        scale=scale,
        enable_gqa=q.shape[1] != keys.shape[2],
    )
    return out.transpose(1, 2).reshape(num * width, q.shape[1], out.shape[-1]).index_select(0, rows.place)


def rows_of(
    tables: Seq[Seq[int]], cached: Seq[int], new: Seq[int], first_row: int, block_size: int, device: torch.device
) -> Rows:
    """The rows of sequences whose `new` tokens follow `cached` ones; `tables` are their block tables.

    Args:
        first_row: where the first sequence's new tokens begin in the step's row.
    """
    num, width, longest = len(tables), max(len(t) for t in tables), max(new)
    blocks = torch.zeros(num, width, dtype=torch.int64)
    for i, table in enumerate(tables):
        blocks[i, : len(table)] = torch.tensor(table)
    cached_t, new_t = torch.tensor(cached)[:, None], torch.tensor(new)[:, None]
    steps = torch.arange(longest)[None]
    key_place = torch.arange(width * block_size)
    # A padded query sees its sequence's first token, so that no softmax is over nothing; its output is dropped.
    last_seen = torch.where(steps < new_t, cached_t + steps, torch.zeros_like(steps))
    visible = (key_place[None, None] <= last_seen[:, :, None])[:, None]
    if longest == 1:
        return Rows(None, blocks.to(device), visible.to(device), None)
    starts = first_row + new_t.cumsum(0) - new_t
    inside = steps < new_t
    queries = torch.where(inside, starts + steps, starts)
    place = torch.arange(num * longest).view(num, longest)[inside]
    return Rows(queries.to(device), blocks.to(device), visible.to(device), place.to(device))
