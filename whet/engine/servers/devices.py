"""GPUs of the servers that whet starts: how many a server needs, and which of this machine's each one gets."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Environment variable that names the GPUs of a process: numbers, UUIDs or names of MIG instances."""
OTHER_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables by which users of other GPUs choose devices. They are passed on to servers as they are."""
MIG = "MIG-"
SIZES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "vllm": (("tensor_parallel_size",), ("pipeline_parallel_size",), ("prefill_context_parallel_size",), ("data_parallel_size",)),
    "sglang": (("tp_size", "tensor_parallel_size"), ("pp_size", "pipeline_parallel_size"), ("dp_size", "data_parallel_size")),
}
"""Arguments whose product is the number of a server's GPUs, each by its names; by the kind of server."""
CHOICES: Mapping[str, tuple[str, ...]] = {"vllm": ("device_ids",), "sglang": ("base_gpu_id", "gpu_id_step")}
"""Arguments by which users choose devices themselves, by the kind of server."""


def plain_names(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a server by their names with underscores."""
    return {name.replace("-", "_").lstrip("_"): value for name, value in args.items()}


def nodes_needed(kind: str, args: Mapping[str, Any]) -> int:
    """Number of nodes that a server is on, with as many GPUs on each.

    Raises:
        ValueError: if it is no positive whole number, or does not divide the number of GPUs.
    """
    count, gpus = _size(kind, plain_names(args), ("nnodes",)), gpus_needed(kind, args)
    if gpus % count:
        raise ValueError(f"engine.{kind}.args: a server of {gpus} GPUs cannot be on {count} nodes (nnodes): set sizes that {count} divides")
    return count


def gpus_needed(kind: str, args: Mapping[str, Any]) -> int:
    """Number of GPUs that a server computes on.

    Args:
        kind: vllm or sglang.
        args: the server's arguments. A name may be cut short, as on the server's command line (`{tp = 2}` for SGLang).

    Raises:
        ValueError: if a size is no positive whole number.
    """
    named = plain_names(args)
    if kind == "sglang" and named.get("device") == "cpu":
        return 0
    sizes = {names[0]: _size(kind, named, names) for names in SIZES[kind]}
    if kind == "sglang" and named.get("enable_dp_attention") is True:
        sizes["dp_size"] = 1  # the replicas of attention are on the GPUs of tensor parallelism
    return math.prod(sizes.values())


def _size(kind: str, named: Mapping[str, Any], names: Collection[str]) -> int:
    for given, value in named.items():
        if any(name.startswith(given) for name in names):
            if not str(value).isdecimal() or int(value) < 1:
                what = "nodes" if "nnodes" in names else "processes"
                raise ValueError(f"engine.{kind}.args: {given}={value!r} is no number of {what}; set a whole number of 1 or more")
            return int(value)
    return 1


def chosen_by_user(kind: str, args: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """True if the user chooses the servers' devices by arguments or an environment variable that servers get as they are."""
    return not plain_names(args).keys().isdisjoint(CHOICES[kind]) or any(name in environment for name in OTHER_VISIBLE)


def visible_devices(setting: str | None, count: int) -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them.

    Args:
        setting: value of that variable; None: unset.
        count: GPUs that torch sees: one of several MIG instances.
    """
    if setting is None:
        return tuple(str(i) for i in range(count))
    names = [name.strip() for name in setting.split(",")]
    return tuple(names) if count and all(name.startswith(MIG) for name in names) else tuple(names[:count])


def trainer_devices(device_type: str, index: int | None, environment: Mapping[str, str]) -> frozenset[int]:
    """Places of the trainer's GPUs among the visible ones: that of each of its ranks on this machine.

    Args:
        device_type: type of the trainer's device, as torch names it.
        index: number of the device that the settings name; None: the first one, or that of each rank's number.
        environment: of a process of the trainer; torchrun, or whet, tells there how many there are.
    """
    if device_type != "cuda":
        return frozenset()
    num_ranks = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("WORLD_SIZE") or 1)
    return frozenset([index]) if num_ranks == 1 and index is not None else frozenset(range(num_ranks))


@dataclass(frozen=True, slots=True)
class Assignment:
    """GPUs of each server, as CUDA_VISIBLE_DEVICES names them."""

    devices: tuple[tuple[str, ...], ...]
    """Those of each server; empty: it gets the environment of this process as it is."""
    shared: bool
    """True if a server computes on a GPU of the trainer's."""


def assign_devices(num_servers: int, needed: int, visible: tuple[str, ...], trainer: Collection[int], kind: str) -> Assignment:
    """Give each server GPUs of its own: those that the trainer does not use, if they are enough, else all from the first one on.

    Args:
        num_servers: servers on this machine.
        needed: GPUs of each.
        visible: the GPUs that this process may use; none: servers compute on the CPU.
        trainer: places of the trainer's GPUs among them.
        kind: kind of the servers, for the error.

    Raises:
        ValueError: if servers need more GPUs than there are.
    """
    total = num_servers * needed
    if not visible or not total:
        return Assignment(((),) * num_servers, shared=False)
    if total > len(visible):
        raise ValueError(
            f"engine.servers={num_servers} with {needed} GPU{'s' * (needed > 1)} each (by engine.{kind}.args) need {total} GPUs, and this "
            f"process may use {len(visible)} ({VISIBLE}): set engine.servers or the parallel sizes in engine.{kind}.args lower, or "
            f"{VISIBLE} wider, or place servers on several machines with cluster.backend=ray"
        )
    free = [name for place, name in enumerate(visible) if place not in trainer]
    shared = total > len(free)
    chosen = visible if shared else free
    return Assignment(tuple(tuple(chosen[i : i + needed]) for i in range(0, total, needed)), shared)
