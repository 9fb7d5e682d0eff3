"""Headers of safetensors files: names, shapes and types of tensors, without their contents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their names in safetensors files."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weights in torch's own format: a pickle, of which no part can be read without the rest."""


def weight_headers(folder: Path) -> dict[str, tuple[Path, Tensor]]:
    """File, shape and type of each tensor of a model folder's weights; shape and type as a tensor
    without contents.

    Only the files' headers are read.

    Raises:
        ValueError: a file is missing or damaged, or there are no weights.
    """
    return {name: (path, header) for path in weight_files(folder) for name, header in read_header(path).items()}


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, without their contents.

    Raises:
        ValueError: the file is damaged, or holds a type that torch does not have.
    """
    headers: dict[str, Tensor] = {}
    with open_tensors(path) as file:
        for name in file.keys():  # noqa: SIM118 (it is no mapping)
            piece = file.get_slice(name)
            kind = piece.get_dtype()
            if kind not in DTYPES:
                raise ValueError(f"{path}: {name} is of type {kind}, which whet does not read")
            headers[name] = torch.empty(piece.get_shape(), dtype=DTYPES[kind], device="meta")
    return headers


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file, open for reading.

    Raises:
        ValueError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is cut short or damaged ({error}); copy or download it again") from error
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing") from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would read.

    Raises:
        ValueError: there are none, but perhaps some in torch's own format, or one that the index names is not there.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        if found := next((name for name in TORCH if (folder / name).is_file()), None):
            raise ValueError(
                f"{folder} has its weights in torch's own format ({found}), a pickle, which is not read: write them as safetensors, with "
                "`AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)` of transformers, say"
            )
        raise ValueError(f"{folder} has no weights ({SINGLE}); copy or download the whole model there")
    names = sorted(set(read_index(index).values()))
    lacking = [name for name in names if not (folder / name).is_file()]
    if lacking:
        raise ValueError(f"{folder} lacks {len(lacking)} of the {len(names)} files that {INDEX} names, among them {lacking[0]}")
    return [folder / name for name in names]


def read_index(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index of weights: files in the same folder.

    Raises:
        ValueError: the index cannot be read, or names files outside the folder.
    """
    try:
        found = json.loads(index.read_text())["weight_map"]
        if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
            raise ValueError("it is no table of file names")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} has no readable weight_map: {type(error).__name__}: {error}") from error
    if odd := next((file for file in found.values() if file in ("", ".", "..") or set(file) & set("/\\\0")), None):
        raise ValueError(f"{index} names the file {odd[:200]!r}, which is not in its folder")
    return found
