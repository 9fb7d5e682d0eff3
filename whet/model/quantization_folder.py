"""Folders of quantized weights: their format read from a checkpoint, and a folder in one written from another."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.files import write_durably
from whet.model.folders import open_weights, read_weights, write_weights
from whet.model.quantization import NOT_LINEAR, OWN_FP8, Quantization, format_of, in_format, own_format

CONFIG = "config.json"
JOINED = re.compile(r"\.(q_proj|k_proj|gate_proj|w1)$")
"""Layers whose rows are followed by those of another one, where servers join them."""
WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth", ".gguf")


def checkpoint_format(folder: Path) -> Quantization:
    """The format of a quantized checkpoint.

    Raises:
        ValueError: if it is not quantized, or weights cannot be written in its format.
    """
    config = _config(folder).get("quantization_config")
    if not isinstance(config, dict):
        raise ValueError(f"{folder / CONFIG} has no quantization_config: it is no quantized checkpoint")
    with open_weights(folder) as files:
        names = frozenset(files)
    try:
        return format_of(config, names)
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


def named_format(name: str, folder: Path) -> Quantization:
    """The format `fp8` or `int4` for the model in a folder.

    Raises:
        ValueError: if it does not fit.
    """
    with open_weights(folder) as files:
        shapes = {file: files[file].get_slice(file).get_shape() for file in files}
    if joined := [file for file, shape in shapes.items() if ".experts." in file and len(shape) > 2]:
        raise ValueError(f"{joined[0]} holds several experts, and whet quantizes matrices; take a quantized checkpoint of the model")
    matrices = {file.removesuffix(".weight"): shape for file, shape in shapes.items() if file.endswith(".weight") and len(shape) == 2}
    kept = [layer for layer in matrices if NOT_LINEAR.search(f"{layer}.weight")]
    quantized = {layer: shape for layer, shape in matrices.items() if layer not in kept}
    size = OWN_FP8[0]
    if name == "fp8" and (odd := [layer for layer in quantized if JOINED.search(layer) and quantized[layer][0] % size]):
        rows = quantized[odd[0]][0]
        raise ValueError(f"servers join {odd[0]} with other layers, so that blocks of {size} must divide its {rows} rows; take int4")
    return own_format(name, [shape[1] for shape in quantized.values()], kept)


def describe_format(folder: Path, quantization: Quantization) -> None:
    """Add a format to a folder's configuration."""
    write_durably(folder / CONFIG, json.dumps({**_config(folder), "quantization_config": dict(quantization.config)}, indent=2) + "\n")


def quantize_folder(source: Path, out: Path, quantization: Quantization, dtype: torch.dtype, shard_bytes: int) -> None:
    """Write a model's folder with quantized weights, tensor by tensor; its other files are copied.

    Args:
        source: the model.
        out: made; what is there is replaced.
        quantization: the format.
        dtype: type of the weights that are quantized, and of those that are not.
        shard_bytes: size of a file of weights.

    Raises:
        ValueError: if the source's weights are quantized themselves, missing or damaged.
    """
    if "quantization_config" in _config(source):
        raise ValueError(f"{source} is quantized already, and training needs its weights as they were before")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copyfile(file, out / file.name)
    describe_format(out, quantization)
    weights: Iterable[tuple[str, Tensor]] = (
        (name, tensor.to(dtype) if name.endswith((".weight", ".bias")) else tensor) for name, tensor in read_weights(source)
    )
    write_weights(out, in_format(weights, quantization), shard_bytes)


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / CONFIG).read_text())
