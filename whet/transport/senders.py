"""From `[sync]` to a sender."""

from __future__ import annotations

from pathlib import Path

from whet.model.decoder import DecoderModel
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.model.quantization import Quantization
from whet.transport.adapter import AdapterWriter
from whet.transport.base import Sender
from whet.transport.broadcast import BroadcastSender
from whet.transport.delta import DeltaSender
from whet.transport.disk import DiskSender
from whet.transport.folder import FolderWriter
from whet.transport.server_broadcast import ServerBroadcastSender
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
    where = _versions_in(config, folder)
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


def adapter_sender_of(config: SyncConfig, folder: Path, writer: AdapterWriter) -> Sender:
    """The trainer's end of the transport of an adapter to servers; arguments as for `sender_of`.

    Raises:
        ValueError: if the settings ask for another than folders.
    """
    if config.transport not in ("auto", "disk"):
        raise ValueError(
            f"sync.transport={config.transport} sends whole weights, and with enable_lora (engine.vllm.args) servers take an adapter, "
            "from a folder: set sync.transport=disk, or leave enable_lora out"
        )
    return DiskSender(_versions_in(config, folder), KEPT, config.timeout_s, writer)


def _versions_in(config: SyncConfig, folder: Path) -> Path:
    """Folder of the versions, for engines with other working folders."""
    return (folder if config.folder is None else Path(config.folder)).absolute()


def server_sender_of(
    config: SyncConfig, model: DecoderModel, folder: Path, address: str, own_routes: str | None, quantization: Quantization | None = None
) -> Sender:
    """The trainer's end of the transport to servers.

    Args:
        config: `[sync]`; `auto` is disk.
        model: model of the servers' shape.
        folder: as in `sender_of`.
        address: as in `sender_of`.
        own_routes: gloo or nccl: the servers take a broadcast over it by routes of their own; None: they have none.
        quantization: as in `sender_of`; what is sent has the names of files already then.

    Raises:
        ValueError: if the model's tensors cannot be sent one after another.
    """
    if config.transport == "broadcast" and own_routes is not None:
        to_files = Naming(without_contents(model)).to_files if quantization is None else lambda name, tensor: [(name, tensor)]
        return ServerBroadcastSender(address, config.timeout_s, config.max_buffer_bytes, own_routes, to_files)
    transport = "disk" if config.transport == "auto" else config.transport
    return sender_of(config.model_copy(update={"transport": transport}), model, folder, address, quantization)
