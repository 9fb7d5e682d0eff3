"""`[cluster]`: where the processes of a run are."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from whet.config import Config, refuse_unread

ENGINE_KEYS = ("layout", "engine_cpus", "engine_gpus", "private_network")
"""Settings of where an engine is."""


class ClusterConfig(Config):
    """Placement of a run's processes: those of `train.parallel`, and those of the engine
    (docs/cluster.md)."""

    backend: Literal["local", "ray"] = "local"
    """Starter of the processes. local: on this machine; ray: as actors, on one node or many. Processes
    that torchrun started are used unchanged."""
    layout: Literal["colocate", "disaggregate", "async"] = "colocate"
    """Placement of engine and trainer. colocate: they share devices and take turns; disaggregate: the
    engine's processes have their own devices, and take turns with the trainer; async: they have their
    own devices, and sample while the trainer computes, within control.max_staleness."""
    address: str | None = None
    """Address of a Ray cluster: auto, or HOST:PORT; unset: RAY_ADDRESS, or else a cluster started on
    this machine for this run."""
    trainer_cpus: float = Field(default=1, gt=0)
    """Processors that Ray sets apart for each process of the trainer."""
    trainer_gpus: float | None = Field(default=None, ge=0)
    """GPUs that Ray sets apart for each process of the trainer; unset: one if the cluster has any. If an
    engine's process is colocated, each of the two gets half of the larger number."""
    engine_cpus: float = Field(default=1, gt=0)
    """Processors for each process of the engine, if the engine has its own (engine.embedded.copies, or
    a layout with separate devices), and for each server."""
    engine_gpus: float | None = Field(default=None, ge=0)
    """GPUs for each process of the engine, and for each server; unset, if the cluster has any: one, or
    as many as the server's arguments ask for."""
    private_network: bool = False
    """True: trusted machines alone reach the nodes' addresses, so servers (engine.name=vllm or sglang)
    may listen there; else they have to be on the controller's node (docs/cluster.md)."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds to wait for the cluster to have room, and for a process of the engine to start."""

    @model_validator(mode="after")
    def _read(self) -> ClusterConfig:
        if self.backend != "ray":
            others = [name for name in ClusterConfig.model_fields if name != "backend"]
            refuse_unread(self, others, f"with cluster.backend={self.backend!r}", "set cluster.backend=ray")
        return self

    @property
    def engine_apart(self) -> bool:
        """True if the engine has its own devices, and so its own processes, however many."""
        return self.layout != "colocate"


def check_layout(config: ClusterConfig, *, overlaps: bool) -> None:
    """Refuse a layout that does not go with who computes when.

    Args:
        config: the settings.
        overlaps: True if groups are played while the trainer computes.

    Raises:
        ValueError: with what to set.
    """
    if config.backend != "ray":
        return
    if config.layout == "async" and not overlaps:
        raise ValueError(
            "cluster.layout=async samples while the trainer computes, but nothing may be sampled then: set control.max_staleness=1 or more "
            "(and leave control.overlap unset), or layout=disaggregate"
        )
    if config.layout != "async" and overlaps:
        raise ValueError(
            f"with cluster.layout={config.layout} engine and trainer take turns, but control.max_staleness and control.overlap have groups "
            "played while the trainer computes: set layout=async, or control.overlap=false"
        )
