"""Weights in a folder in Hugging Face format, written and read tensor by tensor: safetensors files of a bounded size, and their index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.files import sync_file, sync_folder, write_durably
from whet.model.headers import INDEX, SINGLE, open_tensors, read_index
from whet.model.tensor_files import write_tensors


def write_weights(folder: Path, weights: Iterable[tuple[str, Tensor]], shard_bytes: int) -> int:
    """Write weights to files of about `shard_bytes` (a larger tensor has its own file), durably, the
    index last.

    No more than one file's tensors are held at a time.

    Args:
        folder: an existing folder; its files of weights are not read.
        weights: each name once.
        shard_bytes: size of a file.

    Returns:
        Bytes of all tensors.

    Raises:
        OSError: if they cannot be written.
    """
    drafts: list[tuple[Path, list[str]]] = []
    held: dict[str, Tensor] = {}
    size, total = 0, 0

    def put_away() -> None:
        draft = folder / f".weights-{len(drafts):05d}"
        write_tensors(held, draft, {"format": "pt"})
        drafts.append((draft, list(held)))
        held.clear()

    for name, tensor in weights:
        if held and size + tensor.nbytes > shard_bytes:
            put_away()
            size = 0
        held[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
        total += tensor.nbytes
    if held or not drafts:
        put_away()
    _name(folder, drafts, total)
    return total


def _name(folder: Path, drafts: list[tuple[Path, list[str]]], total: int) -> None:
    """Give the files their names, which say how many there are."""
    count = len(drafts)
    places: dict[str, str] = {}
    for i, (draft, names) in enumerate(drafts):
        file = SINGLE if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        sync_file(draft)
        os.replace(draft, folder / file)
        places |= dict.fromkeys(names, file)
    if count > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"
        write_durably(folder / INDEX, text)
    sync_folder(folder)


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder one after another. One file is mapped at a time, and none is read as a whole.

    Raises:
        ValueError: as `open_weights`.
    """
    for file, names in sorted(indexed_files(folder).items()):
        with _opened(folder / file, names) as tensors:
            for name, opened in tensors.items():
                yield name, opened.get_tensor(name)


@contextmanager
def open_weights(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The opened file of each tensor in a folder; `get_tensor(name)` reads one.

    Raises:
        ValueError: if it has no weights, or a file or a tensor is missing or damaged; the text names
            it.
    """
    with ExitStack() as files:
        found = [files.enter_context(_opened(folder / file, names)) for file, names in sorted(indexed_files(folder).items())]
        yield {name: opened for tensors in found for name, opened in tensors.items()}


@contextmanager
def _opened(path: Path, names: list[str]) -> Iterator[Mapping[str, Any]]:
    """A file's tensors, which must be those of `names`; without names any tensors."""
    if not path.is_file():
        raise ValueError(f"{path.parent} lacks {path.name}, which {INDEX} says holds {len(names)} tensors")
    with open_tensors(path) as file:
        found = list(file.keys())
        if lacking := sorted(set(names) - set(found)):
            raise ValueError(f"{path} lacks {len(lacking)} tensors that {INDEX} says it has, among them {', '.join(lacking[:3])}")
        yield dict.fromkeys(names or found, file)


def indexed_files(folder: Path) -> dict[str, list[str]]:
    """The files of weights in a folder, each with its tensors' names; of a file without an index, none are named.

    Raises:
        ValueError: if there are none.
    """
    if (folder / INDEX).is_file():
        out: dict[str, list[str]] = {}
        for name, file in read_index(folder / INDEX).items():
            out.setdefault(file, []).append(name)
        return out
    if (folder / SINGLE).is_file():
        return {SINGLE: []}
    raise ValueError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}")


def dtype_named(name: str) -> torch.dtype:
    """A type by torch's name, such as bfloat16.

    Raises:
        ValueError: if torch has no type of this name.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of torch's, such as float32 or bfloat16")
    return found
