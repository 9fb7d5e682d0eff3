"""The memory of an engine's own weights, freed while nobody computes with them."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


class OwnMemory:
    """Frees the memory of tensors. They stay the same tensors, and their contents are lost.

    Args:
        tensors: of this process alone. Memory that several share is freed once; of a spread tensor it is this rank's part.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._freed: list[tuple[UntypedStorage, int]] = []
        storages = {storage.data_ptr(): storage for storage in map(_storage, tensors)}
        for storage in storages.values():
            if storage.resizable():
                self._freed.append((storage, storage.nbytes()))
                storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory again. Its contents are undefined."""
        for storage, size_bytes in self._freed:
            storage.resize_(size_bytes)
        self._freed.clear()


def _storage(tensor: Tensor) -> UntypedStorage:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage()
