"""Memory of one process that another one on the same machine opens, without a copy: on a GPU by CUDA's handles, else a shared file's."""

from __future__ import annotations

import json
import socket
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from whet.transport.base import TransportError


def handed(data: Tensor) -> tuple[bytes, Tensor]:
    """A description by which others open bytes, and the tensor that has to be kept until nobody has them open.

    Args:
        data: [bytes] uint8. On a CPU it is copied into memory that can be shared.
    """
    if data.device.type == "cuda":
        parts = data.untyped_storage()._share_cuda_()
        device = str(torch.cuda.get_device_properties(data.device).uuid)
        handle_parts = ("cuda", device, [_text(part) for part in parts[1:]], int(data.storage_offset()))
        return _described(handle_parts, data), data
    storage = UntypedStorage._new_using_filename_cpu(data.nbytes)
    kept = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (data.numel(),), (1,))
    kept.copy_(data)
    manager, handle, _ = storage._share_filename_cpu_()
    return _described(("cpu", "", [_text(manager), _text(handle), data.nbytes], 0), kept), kept


def opened(description: bytes) -> Tensor:
    """The bytes that another process handed over, in its own memory. [bytes] uint8

    Raises:
        TransportError: if they are another machine's, or of a GPU that this process does not see.
    """
    host, size, (kind, device, parts, offset) = json.loads(description)
    if host != socket.gethostname():
        raise TransportError(
            f"the trainer's memory is on {host}, and this is {socket.gethostname()}: sync.transport=ipc is for engines on one machine with "
            "it; use broadcast, disk or delta"
        )
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in parts]
    try:
        storage = _cuda_storage(device, parts) if kind == "cuda" else UntypedStorage._new_shared_filename_cpu(*parts)
    except RuntimeError as error:
        raise TransportError(f"the trainer's memory cannot be opened: {error}; use another sync.transport") from error
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (size,), (1,))


def _cuda_storage(uuid: str, parts: list[Any]) -> UntypedStorage:
    """Storage on the GPU with this UUID, which may have another index in this process."""
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise TransportError(f"the trainer's GPU {uuid} is none that this process sees: use sync.transport=shared or broadcast")
    return UntypedStorage._new_shared_cuda(seen.index(uuid), *parts)


def _described(handle_parts: tuple[str, str, list[Any], int], data: Tensor) -> bytes:
    return json.dumps((socket.gethostname(), data.numel(), handle_parts)).encode()


def _text(part: Any) -> Any:
    return part.hex() if isinstance(part, bytes) else part
