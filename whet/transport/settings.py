"""`[sync]`: how weights travel from the trainer to engines in processes of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from whet.config import Config, refuse_unread


class SyncConfig(Config):
    """Transfer of new weights to engines in processes of their own (docs/weight-sync.md). Every version
    is proven with every transport."""

    transport: Literal["auto", "shared", "ipc", "broadcast", "disk", "delta"] = "auto"
    """Transport of weights. shared: one file in the machine's memory, which all engines map; ipc:
    memory of the trainer's device that engines on the same machine open; broadcast: a process group
    (gloo; to SGLang's servers NCCL on GPUs); disk: a folder in Hugging Face format for each version; delta: only the changes since the
    version before, compressed; auto: shared."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds that an engine may take over a version before the run stops. By broadcast and ipc they
    bound each of these waits: for the engine to arrive, for a message, and, once everything is sent,
    for the engine's answer."""
    max_buffer_bytes: int = Field(default=2**29, ge=2**20)
    """Size in bytes. ipc and broadcast: weights in flight at a time, in addition to the tensor being
    gathered; disk: a file of weights."""
    folder: str | None = None
    """disk and delta: folder of the versions, on a file system that trainer and engines share; unset:
    `sync` in the run's folder."""

    @property
    def is_mapped(self) -> bool:
        """True if engines share memory with the sender."""
        return self.transport in ("auto", "shared")

    @model_validator(mode="after")
    def _all_read(self) -> SyncConfig:
        unread = {
            "auto": ["max_buffer_bytes", "folder"],
            "shared": ["max_buffer_bytes", "folder"],
            "ipc": ["folder"],
            "broadcast": ["folder"],
            "disk": [],
            "delta": [],
        }[self.transport]
        refuse_unread(self, unread, f"with transport={self.transport!r}", "choose a transport that has it")
        return self


@dataclass(frozen=True, slots=True)
class Syncing:
    """The settings, and what they leave to the run."""

    config: SyncConfig
    folder: Path
    """For versions on disk, unless the settings name another."""

    @property
    def versions(self) -> Path:
        """Folder of the versions on disk."""
        folder = self.folder if self.config.folder is None else Path(self.config.folder)
        return folder.absolute()  # engines have other working folders
