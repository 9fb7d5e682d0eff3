"""The memory that an engine's own weights lie in, given back while nobody computes with them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


class OwnMemory:
    """Tensors whose memory can be given back; they stay the same tensors, and what was in them is gone.

    Args:
        tensors: of this process alone. Those that share memory with each other give it back once; of a spread one it is this rank's part.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._given_back: list[tuple[UntypedStorage, int]] = []
        storages = {storage.data_ptr(): storage for storage in map(_storage, tensors)}
        for storage in storages.values():
            if storage.resizable():
                self._given_back.append((storage, storage.nbytes()))
                storage.resize_(0)

    def take_back(self) -> None:
        """Have memory again, with anything in it."""
        for storage, size_bytes in self._given_back:
            storage.resize_(size_bytes)
        self._given_back.clear()


def _storage(tensor: Tensor) -> UntypedStorage:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
