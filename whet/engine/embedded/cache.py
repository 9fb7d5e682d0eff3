"""The paged KV cache: blocks with reference counts, and the tensors behind them."""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from whet.engine.base import StaleCache
from whet.engine.embedded.pages import ask_for_huge_pages
from whet.engine.embedded.prefix import PrefixIndex


class OutOfBlocks(Exception):
    """No block is free; the scheduler makes room before it allocates, so this is a bug in it."""


class BlockPool:
    """Pool of blocks of cache slots, with the number of holders of each block and the weights that it
    was filled under.

    A block without holders can still be found through `index` until its place is needed: the one unused
    longest goes first.

    Args:
        num_blocks: blocks in the pool.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = PrefixIndex(block_size)
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks in the index without holders, the one unused longest first."""
        self._holders = [0] * num_blocks
        self.epoch = 0
        """Number of times that the weights have changed."""
        self._filled_in = [0] * num_blocks
        """The epoch in which each block was handed out: its contents are of that epoch's weights."""

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out."""
        return len(self._empty) + len(self._idle)

    @property
    def num_idle_tokens(self) -> int:
        """Cached tokens that nobody holds."""
        return sum(map(self.index.num_tokens, self._idle))

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def allocate(self) -> int:
        """A block with one holder; what it held is forgotten."""
        if self._empty:
            block = self._empty.pop()
        elif self._idle:
            block = self._idle.popitem(last=False)[0]
            self.index.forget(block)
        else:
            raise OutOfBlocks
        self._holders[block] = 1
        self._filled_in[block] = self.epoch
        return block

    def begin_epoch(self) -> None:
        """The weights have changed: blocks that are handed out from now on belong to the new ones, and only they may be read."""
        self.epoch += 1
        self.index.begin(self.epoch)

    def check_fresh(self, blocks: Iterable[int]) -> None:
        """See that blocks were filled under the present weights.

        Raises:
            StaleCache: naming the first that was not.
        """
        for block in blocks:
            if self._filled_in[block] != self.epoch:
                age = self.epoch - self._filled_in[block]
                raise StaleCache(f"cache block {block} holds keys and values of the weights of {age} update(s) ago: it was not dropped")

    def hold(self, block: int) -> None:
        """One more holder, of a block that is held or idle."""
        if self._holders[block] == 0:
            assert block in self._idle, f"block {block} is empty"
            del self._idle[block]
        self._holders[block] += 1

    def drop(self, block: int) -> None:
        """One holder fewer; after the last one the block can be handed out again."""
        assert self._holders[block] > 0, f"block {block} is free"
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if self.index.knows(block):
                self._idle[block] = None
            else:
                self._empty.append(block)

    def forget(self) -> None:
        """Nothing that is cached can be found any more."""
        self._empty.extend(self._idle)
        self._idle.clear()
        self.index.clear()

    def shared(self, block: int) -> bool:
        return self._holders[block] > 1


class KVStore:
    """The cached keys and values of every layer, made when a layer first writes, in the shapes that it writes.

    Each layer's tensors are [num_blocks, block_size, kv_heads, D].
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._scratch: list[Tensor | None] = [None, None]

    def pools(self, num_layers: int, kv_heads: int, dim: int) -> list[tuple[Tensor, Tensor]]:
        """The tensors of every layer of a model in float32 on the CPU."""
        missing = [layer for layer in range(num_layers) if layer not in self._layers]
        for layer in missing:
            self._make(layer, *(torch.empty(0, kv_heads, dim) for _ in range(2)))
        return [self._layers[layer] for layer in range(num_layers)]

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k [T, kv_heads, D] and v [T, kv_heads, Dv] at `slots` [T]."""
        if layer not in self._layers:
            self._make(layer, k, v)
        for pool, new in zip(self._layers[layer], (k, v), strict=True):
            pool.view(-1, *new.shape[1:]).index_copy_(0, slots, new)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values in the blocks of each row of `blocks` [B, NB]; valid until the next read.

        Returns:
            [B, kv_heads, NB * block_size, D], twice.
        """
        num, width = blocks.shape
        flat = blocks.flatten()
        keys, values = (
            self._gather(which, pool, flat).view(num, width * self.block_size, *pool.shape[2:]).transpose(1, 2)
            for which, pool in enumerate(self._layers[layer])
        )
        return keys, values

    def gathered(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The same in new tensors, which the next read leaves alone."""
        num, width = blocks.shape
        flat = blocks.flatten()
        keys, values = (
            pool.index_select(0, flat).view(num, width * self.block_size, *pool.shape[2:]).transpose(1, 2) for pool in self._layers[layer]
        )
        return keys, values

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in every layer (copy on write)."""
        for pair in self._layers.values():
            for pool in pair:
                pool[target].copy_(pool[source])

    @property
    def size_bytes(self) -> int:
        return sum(x.nbytes for pair in self._layers.values() for x in pair)

    def clear(self) -> None:
        """Give the memory back."""
        self._layers.clear()
        self._scratch = [None, None]

    def _make(self, layer: int, k: Tensor, v: Tensor) -> None:
        shape = (self.num_blocks, self.block_size)
        self._layers[layer] = (lazy_zeros(k, (*shape, *k.shape[1:])), lazy_zeros(v, (*shape, *v.shape[1:])))

    def _gather(self, which: int, pool: Tensor, flat: Tensor) -> Tensor:
        """Blocks into memory that is used again and again: fresh pages for every layer and step would cost more than the copy."""
        scratch = self._scratch[which]
        if scratch is None or len(scratch) < len(flat) or scratch.shape[1:] != pool.shape[1:]:
            scratch = self._scratch[which] = pool.new_empty(len(flat) + len(flat) // 2, *pool.shape[1:])
        return torch.index_select(pool, 0, flat, out=scratch[: len(flat)])


def lazy_zeros(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of a tensor's kind. On the CPU they take memory when they are first written: most runs fill little of their cache."""
    if tensor.device.type != "cpu":
        return tensor.new_zeros(shape)
    memory = mmap.mmap(-1, math.prod(shape) * tensor.element_size(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    out = torch.frombuffer(memory, dtype=tensor.dtype).view(shape)
    ask_for_huge_pages(out, now=False)
    return out
