"""Bytes that a rank sends, counted as exchanges happen."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

KINDS = ("allgather", "reduce_scatter", "allreduce", "alltoall")


class SentBytes(TorchDispatchMode):
    """By kind of exchange: (n - 1) / n of what n ranks gather, scatter or exchange, twice that of what they add up.

    Numbers of tokens and masks (integers) are not counted.
    """

    def __init__(self):
        super().__init__()
        self.sent = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self._count(func.__name__.replace("_", ""), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name, args):
        kind = next((kind for kind in KINDS if kind.replace("_", "") in name), None)
        tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if kind is None or not tensors:
            return
        ranks = self._size(args)
        size = max(t.nbytes for t in tensors)
        if kind == "allgather" and len(tensors) == 1:  # the functional one has no output among its arguments
            size *= ranks
        self.sent[kind] += size * (ranks - 1) / ranks * (2 if kind == "allreduce" else 1)

    def _size(self, args):
        for arg in args:
            if isinstance(arg, str) and arg not in ("sum", "max", "avg"):
                return _resolve_process_group(arg).size()
            if isinstance(arg, torch.ScriptObject):
                try:
                    return ProcessGroup.unbox(arg).size()
                except RuntimeError:
                    continue  # the operation of a reduction
        return dist.get_world_size()
