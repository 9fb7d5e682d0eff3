"""Objects from one rank to others. Tensors go as they lie in memory, so that no rank holds a second copy of them."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

Exchange = Callable[[Tensor], object]
"""Sends a tensor, or fills it with the one that is sent. [n] uint8 or int64, on the CPU"""


def broadcast_object(found: Any, group: ProcessGroup, shared: Mapping[str, object] | None = None) -> Any:
    """Send an object from the first rank of a group; the other ranks return it, and give None. Pickled, but for its tensors and for what
    the ranks share: every rank is part of the run.

    Args:
        found: holds plain objects and tensors on the CPU.
        group: all of its ranks call this; it exchanges tensors of the CPU.
        shared: objects by name that each rank has its own of. Where one is met, the other ranks put theirs.
    """
    root = dist.get_global_rank(group, 0)

    def exchange(tensor: Tensor) -> None:
        dist.broadcast(tensor, src=root, group=group)

    if dist.get_rank() == root:
        _send(found, exchange, shared or {})
        return found
    return _receive(exchange, shared or {})


def send_object(found: Any, rank: int) -> None:
    """Send an object to a rank, which calls `receive_object`. Pickled, but for its tensors, which are on the CPU."""
    _send(found, lambda tensor: dist.send(tensor, rank), {})


def receive_object(rank: int) -> Any:
    """The object that a rank sends."""
    return _receive(lambda tensor: dist.recv(tensor, rank), {})


def _send(found: Any, exchange: Exchange, shared: Mapping[str, object]) -> None:
    pickler = _Pickler(shared)
    body = pickler.packed(found)
    head = pickle.dumps((body, [(tensor.dtype, tensor.shape) for tensor in pickler.tensors]))
    exchange(torch.tensor([len(head)]))
    exchange(torch.frombuffer(bytearray(head), dtype=torch.uint8))
    for tensor in pickler.tensors:
        if tensor.numel():
            exchange(tensor.view(-1).view(torch.uint8))


def _receive(exchange: Exchange, shared: Mapping[str, object]) -> Any:
    size = torch.zeros(1, dtype=torch.int64)
    exchange(size)
    head = torch.empty(int(size), dtype=torch.uint8)
    exchange(head)
    body, shapes = pickle.loads(head.numpy().tobytes())
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in shapes]
    for tensor in tensors:
        if tensor.numel():
            exchange(tensor.view(-1).view(torch.uint8))
    return _Unpickler(body, tensors, shared).load()


class _Pickler(pickle.Pickler):
    """Puts a number in the place of each tensor, and a name in that of each shared object."""

    def __init__(self, shared: Mapping[str, object]) -> None:
        self._out = io.BytesIO()
        super().__init__(self._out)
        self.tensors: list[Tensor] = []
        self._names = {id(each): name for name, each in shared.items()}

    def packed(self, found: Any) -> bytes:
        self.dump(found)
        return self._out.getvalue()

    def persistent_id(self, obj: Any) -> int | str | None:
        if (name := self._names.get(id(obj))) is not None:
            return name
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.requires_grad:
            return None
        self.tensors.append(obj.contiguous())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the tensors and the shared objects back.

    Args:
        data: pickled by `_Pickler`.
        tensors: the tensors, in its order.
        shared: this rank's objects.
    """

    def __init__(self, data: bytes, tensors: list[Tensor], shared: Mapping[str, object]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors, self._shared = tensors, shared

    def persistent_load(self, pid: int | str) -> Any:
        return self._shared[pid] if isinstance(pid, str) else self._tensors[pid]
