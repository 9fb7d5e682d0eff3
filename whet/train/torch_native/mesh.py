"""Which rank computes what: the degrees of parallelism, and the process groups that they make."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from whet.train.torch_native.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class Mesh:
    """The process groups of a job, as one rank sees them. Neighbours share most: tensor, then context, then shard, then replicate."""

    config: ParallelConfig
    parameters: DeviceMesh
    """(replicate, shard, tensor): the ranks of a row shard parameters as others do, so `shard` is shard x context here."""
    rows: DeviceMesh
    """(data, context, tensor)"""
    experts: DeviceMesh | None
    """(replicate, shard, expert): `shard` is what is left of it for the experts. None: no expert is spread."""
    writers: ProcessGroup
    """Group of all ranks on CPUs, for agreement while files are written concurrently with computation."""

    @property
    def device_type(self) -> str:
        return self.parameters.device_type

    @property
    def data_rank(self) -> int:
        """Which of the ranks with samples of their own this one belongs to."""
        return self.rows.get_local_rank("data")

    @property
    def data_group(self) -> ProcessGroup:
        """One rank for each share of the samples."""
        return self.rows.get_group("data")

    @property
    def share_heads(self) -> list[int]:
        """The first rank of each share of the samples: those of rank 0's `data_group`."""
        return self.rows.mesh[:, 0, 0].tolist()

    @property
    def share_groups(self) -> list[ProcessGroup]:
        """The groups over which what the head of a share has reaches its other ranks, in this order. Empty: it has none."""
        heads = self.rows.get_local_rank("tensor") == 0 and self.config.context > 1
        return [*([self.rows.get_group("context")] if heads else []), *([self.rows.get_group("tensor")] if self.config.tensor > 1 else [])]

    def sharded(self, mesh: DeviceMesh) -> DeviceMesh:
        """Over which dimensions of one of the meshes parameters are sharded, and copied if there are replicas."""
        return mesh["replicate", "shard"] if self.config.replicate > 1 else mesh["shard"]


_MADE: dict[tuple[str, str, ProcessGroup | None], Mesh] = {}


def mesh_of(config: ParallelConfig, device_type: str, key: str = "train.parallel") -> Mesh:
    """The process groups, made once for all models of a job; every rank calls it.

    Args:
        config: the degrees.
        device_type: cpu or cuda.
        key: the setting that the degrees come from, for error messages.

    Raises:
        ValueError: if there are other ranks than the degrees ask for.
    """
    if not dist.is_initialized() or dist.get_world_size() != config.num_ranks:
        found = dist.get_world_size() if dist.is_initialized() else 1
        raise ValueError(
            f"{key}: replicate ({config.replicate}) x shard ({config.shard}) x context ({config.context}) x tensor "
            f"({config.tensor}) is {config.num_ranks}, but the processes of this job are {found}; start as many (torchrun "
            f"--nproc-per-node {config.num_ranks} -m whet ...), or change the degrees"
        )
    made = (config.model_dump_json(), device_type, dist.group.WORLD)
    if made not in _MADE:
        _MADE[made] = _make(config, device_type)
    return _MADE[made]


def share_generator() -> None:
    """Have torch's generator on every rank go on from where the first rank's is: what all of them draw next is the same.

    The first rank may have drawn before, in functions of the user's that it alone calls.
    """
    state = torch.get_rng_state()
    dist.broadcast(state, src=0)
    torch.set_rng_state(state)


def _make(config: ParallelConfig, device_type: str) -> Mesh:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # it advises on meshes, which are not the user's
    sharded = config.shard * config.context
    parameters = init_device_mesh(
        device_type, (config.replicate, sharded, config.tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    rows = init_device_mesh(device_type, (config.num_data, config.context, config.tensor), mesh_dim_names=("data", "context", "tensor"))
    experts = None
    if config.expert > 1:
        left = sharded * config.tensor // config.expert
        experts = init_device_mesh(device_type, (config.replicate, left, config.expert), mesh_dim_names=("replicate", "shard", "expert"))
    writers = dist.new_group()
    assert isinstance(writers, ProcessGroup)
    return Mesh(config, parameters, rows, experts, writers)
