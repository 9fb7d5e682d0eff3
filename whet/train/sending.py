"""Objects from rank 0 to the other ranks of a group. Tensors go as they lie in memory, so that nobody holds a second copy of them."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def broadcast_object(found: Any, group: ProcessGroup) -> Any:
    """Send an object from rank 0; the other ranks return it, and give None. Pickled, but for its tensors: every rank is part of the run.

    Args:
        found: holds plain objects and tensors on the CPU.
        group: gloo, all of whose ranks call this.
    """
    if dist.get_rank() == 0:
        pickler = _Pickler()
        head = pickler.packed(found)
        dist.broadcast_object_list([head, [(tensor.dtype, tensor.shape) for tensor in pickler.tensors]], src=0, group=group)
        for tensor in pickler.tensors:
            _broadcast(tensor, group)
        return found
    received: list[Any] = [None, None]
    dist.broadcast_object_list(received, src=0, group=group)
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in received[1]]
    for tensor in tensors:
        _broadcast(tensor, group)
    return _Unpickler(received[0], tensors).load()


def _broadcast(tensor: Tensor, group: ProcessGroup) -> None:
    if tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=0, group=group)


class _Pickler(pickle.Pickler):
    """Puts a number in the place of each tensor."""

    def __init__(self) -> None:
        self._out = io.BytesIO()
        super().__init__(self._out)
        self.tensors: list[Tensor] = []

    def packed(self, found: Any) -> bytes:
        self.dump(found)
        return self._out.getvalue()

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.requires_grad:
            return None
        self.tensors.append(obj.contiguous())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back.

    Args:
        data: pickled by `_Pickler`.
        tensors: the tensors, in its order.
    """

    def __init__(self, data: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]
