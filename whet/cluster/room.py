"""Resources that a run reserves on a cluster: the bundle of each process, and its share of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from whet.cluster.config import ClusterConfig

Bundle = Mapping[str, float]
"""Resources that are together on one node, by Ray's names of them."""
ROOM = "WHET_ROOM"
"""In the environment of a job's controller: where the engine's processes go (`EngineRoom` as JSON)."""


@dataclass(frozen=True, slots=True)
class Room:
    """The bundles of a run. Rank i of the trainer is in bundle i."""

    bundles: tuple[Bundle, ...]
    trainer: Bundle
    """Resources of each process of the trainer in its bundle."""
    engine: Bundle
    """Resources of each process of the engine in its bundle."""
    engines: tuple[int, ...]
    """The bundle of each process of the engine; none where it runs in the controller's own."""


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """Data that a job's controller needs to start the engine's processes."""

    address: str
    """Address of the cluster."""
    namespace: str
    """In which the placement group has its name."""
    group: str
    engine: Bundle
    engines: tuple[int, ...]
    controller: str
    """The node that the controller is on, as Ray names it."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> EngineRoom:
        values = json.loads(text)
        return cls(**{**values, "engines": tuple(values["engines"])})


def plan_room(config: ClusterConfig, num_ranks: int, num_engines: int, gpus_there: float, gpus_each: int = 1) -> Room:
    """The bundles that a layout needs.

    Args:
        config: the settings.
        num_ranks: processes of the trainer.
        num_engines: processes of the engine; 0: it runs in the controller's.
        gpus_there: GPUs of the whole cluster.
        gpus_each: GPUs that each process of the engine computes on, where there are any.

    Raises:
        ValueError: if the settings give a process of the engine fewer GPUs than it computes on.
    """
    default = float(gpus_there > 0)
    trainer_gpus = default if config.trainer_gpus is None else config.trainer_gpus
    engine_gpus = default * gpus_each if config.engine_gpus is None else config.engine_gpus
    if engine_gpus > 0 and math.ceil(engine_gpus) < gpus_each:
        raise ValueError(
            f"cluster.engine_gpus={engine_gpus:g} is less than the {gpus_each} GPUs that each server computes on by its arguments: leave "
            f"it out, or set {gpus_each}"
        )
    if config.engine_apart:
        trainer, engine = _bundle(config.trainer_cpus, trainer_gpus), _bundle(config.engine_cpus, engine_gpus)
        apart = tuple(range(num_ranks, num_ranks + num_engines))
        return Room((trainer,) * num_ranks + (engine,) * num_engines, trainer, engine, apart)
    if not num_engines:
        trainer = _bundle(config.trainer_cpus, trainer_gpus)
        return Room((trainer,) * num_ranks, trainer, {}, ())
    gpus = max(trainer_gpus, engine_gpus)
    if gpus and gpus_each > 1:
        raise ValueError(
            f"cluster.layout=colocate has a server share the GPU of one rank, and each server computes on {gpus_each} GPUs by its "
            "arguments: set cluster.layout=disaggregate or async, or, on one machine, cluster.backend=local"
        )
    trainer, engine = _bundle(config.trainer_cpus, gpus / 2), _bundle(config.engine_cpus, gpus / 2)
    both = _bundle(config.trainer_cpus + config.engine_cpus, gpus)
    return Room((both,) * max(num_ranks, num_engines), trainer, engine, tuple(range(num_engines)))


def _bundle(cpus: float, gpus: float) -> Bundle:
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
