"""`whet convert`: weights between Hugging Face folders, DCP and checkpoints of runs, tensor by tensor, read back before it is believed."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from whet.checkpoint.dcp import DcpReader, write_dcp
from whet.checkpoint.run_state import STATE
from whet.checkpoint.store import MANIFEST, find_checkpoint, write_manifest
from whet.data.hub import resolve_model_path
from whet.model.config import ModelConfig
from whet.model.dcp_files import META
from whet.model.digest import differences, digests_of
from whet.model.folders import dtype_named, indexed_files, read_weights, write_weights
from whet.model.headers import open_tensors
from whet.model.meta import read_meta
from whet.model.naming import Naming
from whet.model.tensor_files import write_tensors
from whet.observe.inside import open_inside
from whet.train.torch_native.saving import BASE, BUFFERS
from whet.types import Progress

To = Literal["hf", "dcp"]
WEIGHTS = "weights"
"""Weights of a checkpoint: a DCP folder of this name, or a file of this name with an ending; buffers
are next to it."""


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """Result of a conversion."""

    num_tensors: int
    size_bytes: int
    left_out: tuple[str, ...]
    """Tensors of the source that the model has no place for."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Weights to read."""

    described: Path
    """The Hugging Face folder with the model's config.json and tokenizer."""
    names: set[str]
    read: Callable[[str], Tensor]
    as_in_files: bool
    """True if names are those of Hugging Face files, False if they are the model's own."""
    buffers: Mapping[str, Path]
    """Files that hold what no optimizer changes, by the model's own names, where `read` does not have it."""


def convert(
    source: Path, target: Path, to: To, *, model: str | None = None, dtype: str | None = None, shard_bytes: int = 5 * 2**30
) -> ConversionResult:
    """Convert weights, without ever holding more than one file of them.

    Args:
        source: a Hugging Face folder, a DCP folder that this function wrote, a run's folder (its newest
            checkpoint), or a checkpoint.
        target: a folder that does not exist yet.
        to: hf: safetensors with an index, config.json and the tokenizer; dcp: the same files next to a
            checkpoint of the weights alone, with which a run can begin (`checkpoint.restore`).
        model: for a checkpoint of a run, which has weights alone: the folder or hub name with the
            model's other files. The name in the checkpoint's own settings is not followed: it may come
            from anywhere.
        dtype: type for all floating-point tensors; None: each tensor keeps its own.
        shard_bytes: size of a file; a larger tensor has its own file.

    Raises:
        ValueError: if something is missing, damaged, or reads back differently.
        OSError: if it cannot be written; nothing is left then.
    """
    if target.exists():
        raise ValueError(f"{target} is there already; choose another folder, or remove it")
    kind = None if dtype is None else dtype_named(dtype)
    found = open_source(source, model)
    naming = Naming(read_meta(found.described, ModelConfig(path=str(found.described), device="cpu")))
    draft = target.with_name(f".{target.name}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        size, written, dtypes = _write(found, naming, draft, to, kind, shard_bytes)
        _describe(found.described, draft, dtypes)
        if to == "dcp":
            (draft / STATE).write_text(json.dumps({"parts": {}, "others": {}, "log_offset": 0}))
            write_manifest(draft, Progress(), {}, {"converted_from": str(source)})
        read_back(draft, to, written)
        os.replace(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    known = naming.file_names if found.as_in_files else set(naming.own)
    return ConversionResult(len(written), size, tuple(sorted(found.names - known - naming.aliases)))


def _write(
    source: WeightSource, naming: Naming, draft: Path, to: To, dtype: torch.dtype | None, shard_bytes: int
) -> tuple[int, dict[str, str], set[str]]:
    """Returns bytes, the digest of each tensor, and the floating point types that there are."""
    digests: dict[str, str] = {}
    dtypes: set[str] = set()

    def noted(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            tensor = tensor.contiguous()
            digests.update(digests_of([(name, tensor)]))
            if tensor.is_floating_point():
                dtypes.add(str(tensor.dtype).removeprefix("torch."))
            yield name, tensor

    def own(names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            tensor = _own_tensor(source, naming, name)
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    if to == "hf":
        parts = (part for name, tensor in own(naming.own) for part in naming.to_files(name, tensor))
        return write_weights(draft, noted(parts), shard_bytes), digests, dtypes
    size = write_dcp(draft / WEIGHTS, noted(own(naming.parameters)), shard_bytes)
    if naming.buffers:
        write_tensors(dict(noted(own(naming.buffers))), draft / BUFFERS)
    return size, digests, dtypes


def _own_tensor(source: WeightSource, naming: Naming, name: str) -> Tensor:
    if name in naming.buffers and name in source.buffers:
        return naming.fitting(name, _read_file(source.buffers[name], name))
    needed = naming.files[name] if source.as_in_files else [name]
    if lacking := [each for each in needed if each not in source.names]:
        raise ValueError(f"the source lacks {len(lacking)} tensors of {name}, among them {lacking[0]}")
    return naming.from_files(name, source.read) if source.as_in_files else naming.fitting(name, source.read(name))


def open_source(path: Path, model: str | None = None) -> WeightSource:
    """The weights that a path names; `model` has the files that a run's checkpoint lacks.

    Raises:
        ValueError: if it cannot be converted, or it is damaged.
    """
    if (path / WEIGHTS / META).is_file() or (path / MANIFEST).is_file() or (path / "checkpoints").is_dir():
        return _checkpoint(find_checkpoint(path).folder, model)
    _refuse_model(path, model)
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} is no model folder (it has no config.json), no run's folder and no checkpoint")
    if "quantization_config" in json.loads(_own_file(path, "config.json").read_text()):
        raise ValueError(f"{path} holds quantized weights, which cannot be converted; use the model in bfloat16")
    places = _safetensors(path)
    return WeightSource(path, set(places), lambda name: _read_file(places[name], name), as_in_files=True, buffers={})


def _checkpoint(folder: Path, model: str | None) -> WeightSource:
    """A checkpoint of a run, or one that `convert` wrote. Buffers are next to it, or with the model's
    other files."""
    if (folder / BASE).is_file():
        raise ValueError(f"{folder} holds an adapter alone; the run's folder has the model that it was added to, `merged`, if asked for")
    if (folder / "config.json").is_file():
        _refuse_model(folder, model)
        described = folder
    elif model is None:
        raise ValueError(
            f"{folder} holds weights alone{_named_model(folder)}; give the folder with its config.json and tokenizer by --model: no path "
            "in a checkpoint is followed"
        )
    else:
        described = resolve_model_path(model)
    file = folder / f"{WEIGHTS}.safetensors"
    if file.is_file():
        names, read = _names(file), lambda name: _read_file(file, name)
    else:
        reader = DcpReader(folder / WEIGHTS)
        names, read = reader.names, reader.read
    if described == folder:
        buffers = dict.fromkeys(_names(folder / BUFFERS), folder / BUFFERS) if (folder / BUFFERS).is_file() else {}
    else:
        buffers = _safetensors(described)
    return WeightSource(described, names, read, as_in_files=False, buffers=buffers)


def _refuse_model(folder: Path, model: str | None) -> None:
    if model is not None:
        raise ValueError(f"{folder} has a config.json of its own: leave --model out")


def _named_model(folder: Path) -> str:
    """The model that a run's settings name, as a part of an error."""
    try:
        with open_inside(folder, "config.toml") as file:
            return f" of the model {str(tomllib.load(file)['model']['path'])[:200]!r}"
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # settings that are none: there is no name to tell
        return ""


def _safetensors(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    return {name: _own_file(folder, file) for file, names in indexed_files(folder).items() for name in (names or _names(folder / file))}


def _own_file(folder: Path, name: str) -> Path:
    """A file of a model's folder. In the hub's cache the files of a snapshot are links to the same
    model's blobs.

    Raises:
        ValueError: if the file is outside.
    """
    home = folder.resolve()
    home = home.parents[1] if home.parent.name == "snapshots" and (home.parents[1] / "blobs").is_dir() else home
    if not (folder / name).resolve().is_relative_to(home):
        raise ValueError(f"{folder / name} leads out of the folder, and no such link is followed: put the file itself there")
    return folder / name


def _names(file: Path) -> set[str]:
    with open_tensors(file) as opened:
        return set(opened.keys())


def _read_file(file: Path, name: str) -> Tensor:
    with open_tensors(file) as opened:
        return opened.get_tensor(name)


def _describe(source: Path, target: Path, dtypes: set[str]) -> None:
    """Everything of a model folder but weights; config.json says the type of the new ones."""
    for path in source.iterdir():
        of_weights = path.suffix in (".safetensors", ".bin", ".pt") or path.name.endswith((".index.json", ".toml"))
        if path.is_file() and not of_weights and path.name not in (MANIFEST, STATE):
            shutil.copy(_own_file(source, path.name), target / path.name)
    config = json.loads(_own_file(source, "config.json").read_text())
    config.pop("torch_dtype", None)
    if len(dtypes) == 1:
        config["dtype"] = next(iter(dtypes))
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def read_back(folder: Path, to: To, written: dict[str, str]) -> None:
    """Compare what is on the disk with what was written there.

    Raises:
        ValueError: naming the tensors that differ.
    """
    if to == "hf":
        found = digests_of(read_weights(folder))
    else:
        reader = DcpReader(folder / WEIGHTS)
        found = digests_of((name, reader.read(name)) for name in sorted(reader.names))
        if (folder / BUFFERS).is_file():
            found |= digests_of((name, _read_file(folder / BUFFERS, name)) for name in _names(folder / BUFFERS))
    if wrong := differences(written, found):
        raise ValueError(f"{folder} does not read back as it was written: {', '.join(wrong[:5])}; is the disk full or damaged?")
