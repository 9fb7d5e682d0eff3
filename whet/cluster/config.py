"""`[cluster]`: where the processes of a run are."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from whet.config import Config, refuse_unread


class ClusterConfig(Config):
    """Where the processes of a run are started: those of `train.parallel`, and those of the engine (docs/cluster.md)."""

    backend: Literal["local", "ray"] = "local"
    """local: on this machine; ray: as actors, on one node or many. Processes that torchrun started are used as they are."""
    address: str | None = None
    """Of a Ray cluster: auto, or HOST:PORT; unset: that of RAY_ADDRESS, or else one that is started on this machine for this run."""
    trainer_cpus: float = Field(default=1, gt=0)
    """Processors that Ray sets apart for each process of the trainer."""
    trainer_gpus: float | None = Field(default=None, ge=0)
    """GPUs likewise; unset: one where the cluster has any."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """How long is waited for the cluster to have room."""

    @model_validator(mode="after")
    def _read(self) -> ClusterConfig:
        if self.backend != "ray":
            others = [name for name in ClusterConfig.model_fields if name != "backend"]
            refuse_unread(self, others, f"with cluster.backend={self.backend!r}", "set cluster.backend=ray, or leave it out")
        return self
