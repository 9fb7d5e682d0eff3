"""Resources that a run reserves on a cluster: the bundle of each process, and its share of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from whet.cluster.config import ClusterConfig

Bundle = Mapping[str, float]
"""Resources that are together on one node, by Ray's names of them."""
ROOM = "WHET_ROOM"
"""In the environment of a job's controller: where the engine's processes go (`EngineRoom` as JSON)."""


@dataclass(frozen=True, slots=True)
class Room:
    """The bundles of a run."""

    bundles: tuple[Bundle, ...]
    ranks: tuple[int, ...]
    """The bundle of each rank of the trainer."""
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
    devices: tuple[str, ...] = ()
    """GPUs of each process of the engine that uses those of ranks in its bundle, as CUDA_VISIBLE_DEVICES names them; none: Ray gives each
    its own, or a share of one."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> EngineRoom:
        values = json.loads(text)
        return cls(**{**values, "engines": tuple(values["engines"]), "devices": tuple(values["devices"])})


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
    trainer, ranks = _bundle(config.trainer_cpus, trainer_gpus), tuple(range(num_ranks))
    if config.engine_apart:
        engine = _bundle(config.engine_cpus, engine_gpus)
        apart = tuple(range(num_ranks, num_ranks + num_engines))
        return Room((trainer,) * num_ranks + (engine,) * num_engines, ranks, trainer, engine, apart)
    if not num_engines:
        return Room((trainer,) * num_ranks, ranks, trainer, {}, ())
    if gpus_each > 1 and engine_gpus > 0:
        return _room_of_groups(config, num_ranks, num_engines, trainer_gpus, gpus_each)
    gpus = max(trainer_gpus, engine_gpus)
    trainer, engine = _bundle(config.trainer_cpus, gpus / 2), _bundle(config.engine_cpus, gpus / 2)
    both = _bundle(config.trainer_cpus + config.engine_cpus, gpus)
    return Room((both,) * max(num_ranks, num_engines), ranks, trainer, engine, tuple(range(num_engines)))


def _room_of_groups(config: ClusterConfig, num_ranks: int, num_servers: int, trainer_gpus: float, gpus_each: int) -> Room:
    """Bundles in which a server of several GPUs shares those of as many ranks. Ray gives the GPUs to the ranks."""
    if trainer_gpus != 1 or num_servers * gpus_each > num_ranks:
        raise ValueError(
            f"cluster.layout=colocate has each of {num_servers} servers share the GPUs of {gpus_each} ranks, by its arguments, and there "
            f"are {num_ranks} ranks with {trainer_gpus:g} GPUs each (train.parallel, cluster.trainer_gpus): set engine.servers or the "
            "parallel sizes in its args lower, cluster.trainer_gpus=1, or cluster.layout=disaggregate or async"
        )
    trainer, engine = _bundle(config.trainer_cpus, 1), _bundle(config.engine_cpus, 0)
    both = _bundle(gpus_each * config.trainer_cpus + config.engine_cpus, gpus_each)
    left = num_ranks - num_servers * gpus_each
    ranks = [i // gpus_each for i in range(num_servers * gpus_each)] + [num_servers + i for i in range(left)]
    return Room((both,) * num_servers + (trainer,) * left, tuple(ranks), trainer, engine, tuple(range(num_servers)))


def shared_devices(room: Room, gpus: Sequence[str]) -> tuple[str, ...]:
    """GPUs of each process of the engine that uses those of the ranks in its bundle; none: Ray gives it its own.

    Args:
        room: the bundles.
        gpus: GPUs of each rank, as CUDA_VISIBLE_DEVICES names them.
    """
    if "GPU" in room.engine or "GPU" not in room.trainer:
        return ()
    found = [",".join(each for bundle, each in zip(room.ranks, gpus, strict=True) if bundle == engine) for engine in room.engines]
    return tuple(found) if all(found) else ()


def _bundle(cpus: float, gpus: float) -> Bundle:
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
