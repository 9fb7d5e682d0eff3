"""From `[sync]` to a sender."""

from __future__ import annotations

from pathlib import Path

from whet.model.decoder import DecoderModel
from whet.model.quantization import Quantization
from whet.transport.base import Sender
from whet.transport.broadcast import BroadcastSender
from whet.transport.delta import DeltaSender
from whet.transport.disk import DiskSender
from whet.transport.folder import FolderWriter
from whet.transport.settings import SyncConfig
from whet.transport.shared import SharedSender
from whet.transport.versions import KEPT


def sender_of(
    config: SyncConfig, model: DecoderModel, folder: Path, address: str, quantization: Quantization | None = None
) -> Sender:
    """The trainer's end of the transport that the settings ask for.

    Args:
        config: `[sync]`.
        model: model of the engines' shape; its tensors are the mapped ones, where the engines share memory.
        folder: for versions on disk, unless the settings name another.
        address: this machine's, as engines know it.
        quantization: format of the versions on disk; None: as the weights are.
    """
    where = (folder if config.folder is None else Path(config.folder)).absolute()  # engines have other working folders
    match config.transport:
        case "auto" | "shared":
            return SharedSender(dict(model.named_weights()), config.timeout_s)
        case "broadcast":
            return BroadcastSender(address, config.timeout_s, config.max_buffer_bytes)
        case "ipc":
            return BroadcastSender(address, config.timeout_s, config.max_buffer_bytes, "ipc")
        case "disk":
            return DiskSender(where, KEPT, config.timeout_s, FolderWriter(model, config.max_buffer_bytes, quantization))
        case "delta":
            return DeltaSender(where, KEPT, config.timeout_s, FolderWriter(model, config.max_buffer_bytes))
