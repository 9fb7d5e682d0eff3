"""Memory of operations: each storage that they make is followed from its allocation to its release."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """Counts the bytes that are alive, by kind, while it is entered. Works on the meta device, where nothing
    is allocated.

    What was there before is not counted, nor are views of it. A question for a truth value that a meta tensor
    cannot answer is answered with yes: models ask whether a row holds a single sequence, and any answer does.
    The product of fused experts, which the meta device has for bfloat16 alone, is there in every type.

    Args:
        kind: gives the kind of a new tensor; None: it is not counted.
    """

    def __init__(self, kind: Callable[[Tensor], str | None]) -> None:
        super().__init__()
        self._kind = kind
        self._known: Any = WeakIdKeyDictionary()
        self._live: dict[str, int] = {}
        self._peak: dict[str, int] = {}

    def peak(self, kind: str) -> int:
        """The most bytes of that kind that were alive at a time."""
        return self._peak.get(kind, 0)

    def now(self, kind: str) -> int:
        """The bytes of that kind that are alive."""
        return self._live.get(kind, 0)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func is torch.ops.aten._local_scalar_dense.default and given[0].is_meta and given[0].dtype is torch.bool:
            return True
        for tensor in given:
            self._known.setdefault(tensor.untyped_storage(), True)
        lacking = func is torch.ops.aten._grouped_mm.default and given[0].is_meta
        out = _grouped_mm(*given) if lacking else func(*args, **kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._follow(tensor)
        return out

    def _follow(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = True
        kind = self._kind(tensor)
        if kind is None:
            return
        size = storage.nbytes()
        self._live[kind] = self._live.get(kind, 0) + size
        self._peak[kind] = max(self._peak.get(kind, 0), self._live[kind])
        weakref.finalize(storage, self._gone, kind, size).atexit = False

    def _gone(self, kind: str, size: int) -> None:
        self._live[kind] -= size


def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *rest: Tensor) -> Tensor:
    """The result of `torch._grouped_mm` without its contents: one product for each group, whose ends `offs`
    [G] gives.
    """
    if a.dim() == 2 and b.dim() == 2:  # the groups are stretches of the dimension that is summed over
        assert offs is not None
        return a.new_empty(len(offs), a.shape[0], b.shape[1])
    if a.dim() == 2:  # stretches of a's rows
        return a.new_empty(a.shape[0], b.shape[2])
    if b.dim() == 2:  # stretches of b's columns
        return a.new_empty(a.shape[1], b.shape[1])
    return a.new_empty(a.shape[0], a.shape[1], b.shape[2])
