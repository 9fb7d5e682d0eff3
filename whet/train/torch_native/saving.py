"""Named tensors on disk: one safetensors file of a process alone, or shards (DCP) of a mesh. Either is read by either."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from whet.model.dcp_files import DcpFiles
from whet.model.lora import Adapter
from whet.model.tensor_files import write_tensors
from whet.train.torch_native.optim import Optimizer
from whet.types import JSON

WEIGHTS, OPTIMIZER, PLACE = "weights.safetensors", "optimizer.safetensors", "optimizer.json"
"""Files of a checkpoint: its tensors, and the optimizer's name with its place in the schedule."""
BASE = "base.json"
"""File of an adapter's checkpoint: the digest of the base model's weights."""
BUFFERS = "buffers.safetensors"
"""File of a checkpoint: the model's buffers, which no optimizer changes, such as the routing bias of
DeepSeek-V3."""


def check_base(path: Path, adapter: Adapter) -> None:
    """Refuse an adapter's checkpoint that was made on another base model, or with another scale.

    Args:
        path: the checkpoint's `base.json`.
        adapter: adapter that takes over the checkpoint.

    Raises:
        ValueError: if they differ, or the checkpoint is not an adapter's.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent} is the checkpoint of a model that was trained whole, not of an adapter: leave train.lora out")
    saved = json.loads(path.read_text())
    if saved["digest"] != adapter.base_digest():
        raise ValueError(f"{path.parent} has an adapter of another base model than model.path: name the one that it began with")
    adapter.check_scale(saved["scale"], path.parent)


def check_buffers(file: Path, own: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse weights that were trained with other buffers than a model has: it would be another one. A file that is not there says nothing.

    Raises:
        ValueError: with the buffer that differs.
    """
    if not file.is_file():
        return
    found, mine = load_file(file), dict(own)
    for name in sorted(found.keys() | mine.keys()):
        if name not in found or name not in mine or not torch.equal(found[name].to(mine[name].dtype), mine[name].cpu()):
            raise ValueError(
                f"{file} is of another model: its buffer {name} is not that of model.path, and no training changes it; name the model that "
                "the checkpoint was made of as model.path"
            )


def save_tensors(tensors: Mapping[str, Tensor], file: Path, writers: ProcessGroup | None = None) -> None:
    """Write tensors to a file, or what is spread over ranks to a folder of its name without the ending; all ranks call it then.

    Args:
        tensors: by name.
        file: see above.
        writers: over which ranks agree on what is spread; None: the default group.

    Raises:
        OSError: if it cannot be written; of shards, by whichever rank.
    """
    if any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        try:
            save({name: tensor.detach() for name, tensor in tensors.items()}, checkpoint_id=file.with_suffix(""), process_group=writers)
        except CheckpointException as error:
            raise _first_failure(error, file) from error
        if dist.get_rank(writers) == 0:
            DcpFiles(file.with_suffix("")).check_there()
        return
    write_tensors({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)


def in_host_memory(tensor: Tensor) -> Tensor:
    """A copy there, cut as it is."""
    return tensor.detach().to("cpu", copy=True)


def _first_failure(error: CheckpointException, file: Path) -> BaseException:
    """Error of the first rank that could not write, as an OSError if it is the system's."""
    rank, (found, _) = next(iter(error.failures.items()))
    if isinstance(found, OSError):
        return OSError(found.errno or errno.EIO, f"rank {rank}: {os.strerror(found.errno) if found.errno else found}", str(file))
    return found


def read_tensors(file: Path, like: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors that `save_tensors` wrote, sharded as `like` is.

    Args:
        file: as it was given to `save_tensors`.
        like: a tensor of each name that may be there.

    Raises:
        ValueError: if shards have other names or shapes.
    """
    if file.is_file():
        return load_file(file)
    files = DcpFiles(file.with_suffix(""))
    found = files.entries
    odd = sorted(found.keys() - like.keys())
    if odd:
        some = ", ".join(odd[:3])
        raise ValueError(f"{files.folder} is of another model: it has {len(odd)} tensors that this one has not, among them {some}")
    for name, entry in found.items():
        if (entry.size, entry.dtype) != (tuple(like[name].shape), like[name].dtype):
            wanted = f"{like[name].dtype} {tuple(like[name].shape)}"
            raise ValueError(f"{files.folder} is of another model: {name} is {entry.dtype} {entry.size}, not {wanted}")
    out = {name: torch.zeros_like(like[name]) for name in found}
    _on_all_ranks(lambda: _read_parts(files, out))
    return out


@torch.no_grad()
def _read_parts(files: DcpFiles, out: Mapping[str, Tensor]) -> None:
    """Fill tensors, of those that are spread what this rank has."""
    for name, tensor in out.items():
        if not isinstance(tensor, DTensor):
            files.read_into(name, tensor, [0] * tensor.dim())
        elif tensor.device_mesh.get_coordinate() is not None:
            (part,) = tensor.__create_chunk_list__()
            files.read_into(name, tensor.to_local(), part.offsets)


def _on_all_ranks(read: Callable[[], None]) -> None:
    """Make a call on every rank, and fail on all where one fails: the others would wait for it in the next exchange.

    Raises:
        ValueError: error of the call on the first rank that failed.
    """
    failure = None
    try:
        read()
    except ValueError as error:
        if not dist.is_initialized():
            raise
        failure = str(error)
    if dist.is_initialized():
        by_rank: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, failure)
        for rank, each in enumerate(by_rank):
            if each is not None:
                raise ValueError(f"rank {rank}: {each}")


def load_optimizer(optimizer: Optimizer, folder: Path) -> JSON:
    """Take over a checkpoint's moments, masters and place in the schedule.

    Returns:
        State of its `LossScale`; None, if it had none.

    Raises:
        ValueError: if it is of another optimizer or model, or of a layout whose moments cannot be taken over.
    """
    name, saved = optimizer.config.name, json.loads((folder / PLACE).read_text())
    if saved["name"] != name:
        raise ValueError(
            f"{folder / PLACE} is of optim.name={saved['name']}, and this run has optim.name={name}: set it to {saved['name']}, or begin a "
            "run with the checkpoint's weights alone (checkpoint.restore)"
        )
    optimizer.check_saved(_names(folder / OPTIMIZER))
    optimizer.load_tensors(read_tensors(folder / OPTIMIZER, optimizer.possible_tensors()), saved["steps"])
    return saved.get("loss_scale")


def _names(file: Path) -> set[str]:
    """Names of all tensors that `save_tensors` wrote."""
    if file.is_file():
        with safe_open(file, "pt") as opened:
            return set(opened.keys())
    return set(DcpFiles(file.with_suffix("")).entries)
