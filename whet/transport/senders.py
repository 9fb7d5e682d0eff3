"""From `[sync]` to a sender."""

from __future__ import annotations

from pathlib import Path

from whet.model.decoder import DecoderModel
from whet.transport.base import Sender
from whet.transport.broadcast import BroadcastSender
from whet.transport.delta import DeltaSender
from whet.transport.disk import DiskSender
from whet.transport.settings import SyncConfig
from whet.transport.shared import SharedSender

LOOPBACK = "127.0.0.1"


def sender_of(config: SyncConfig, model: DecoderModel, folder: Path, host: str = LOOPBACK) -> Sender:
    """The trainer's end of the transport that the settings ask for.

    Args:
        config: `[sync]`.
        model: of the engines' shape; its tensors are the mapped ones, where the engines share memory.
        folder: for versions on disk, unless the settings name another.
        host: this machine's address, as engines on other machines know it.
    """

    def describe(target: Path) -> None:
        described = type(model.config).from_dict(model.config.to_dict())
        described.dtype = model.dtype
        described.save_pretrained(target)

    where = folder if config.folder is None else Path(config.folder)
    match config.transport:
        case "auto" | "shared":
            return SharedSender(dict(model.named_weights()), config.timeout_s)
        case "broadcast":
            return BroadcastSender(host, config.timeout_s, config.max_buffer_bytes)
        case "disk":
            return DiskSender(where, config.keep, config.max_buffer_bytes, config.timeout_s, describe)
        case "delta":
            return DeltaSender(where, config.keep, config.max_buffer_bytes, config.timeout_s, describe)
