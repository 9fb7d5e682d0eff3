"""Formats of quantized weights in files, as vLLM and SGLang read them, and the weights of a trainer written in one.

Matrices of linear layers are quantized: in FP8 (e4m3) with a scale for each block, row or tensor, or in integers of 4 or 8 bits with a
scale for each group of a row. A scale is the greatest magnitude that it covers over the greatest that the type holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP8_NATS, INT4_NATS = 2.0, 4.0
"""As `Quantization.nats`: at single tokens of a prompt that makes no sense, as the probe is."""
OwnFormat = Literal["fp8", "int4"]
OWN_FP8 = (128, 128)
"""Rows and columns of a block in the format `fp8`: that of DeepSeek-V3."""
OWN_GROUPS = (128, 64, 32)
"""Sizes of a group in the format `int4`; the first that divides all rows counts."""
NOT_LINEAR = re.compile(r"(embed_tokens|lm_head|(^|\.)gate|_gate|router|norm)\.weight$")
"""Matrices that servers keep as they are: embeddings, heads, and the routers of experts."""
SCALES = ("weight_scale", "weight_scale_inv")
"""Names of a matrix's scales, of which every format has one."""
IN_ORDER = (None, "weight", "static")
"""Values of `actorder` under which the groups of a row are neighbours in files; it says how the checkpoint was calibrated."""
STATIC = "its scales were measured with other weights, and whet writes none; take a checkpoint with dynamic ones"
QuantizeMatrix = Callable[[str, Tensor], list[tuple[str, Tensor]]]
"""Tensors of files for a matrix, by the name of its layer."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """A format of quantized files."""

    name: str
    """In messages: fp8, int4, or another number of bits."""
    config: Mapping[str, Any]
    """`quantization_config` of config.json."""
    nats: float
    """Distance of log-probs from those of the weights themselves that it explains."""
    quantize: QuantizeMatrix
    ignored: Sequence[str] = field(default=())
    """Layers that are left as they are, by their names, those of modules that hold them, or patterns behind `re:`."""
    names: frozenset[str] | None = None
    """Names of all tensors in files that are to be like these; None: the matrices of all other linear layers are quantized."""

    def files(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors of files for one that is not quantized.

        Raises:
            ValueError: if the files that they are to be like have no such tensor.
        """
        layer = name.removesuffix(".weight")
        is_quantized = name.endswith(".weight") and tensor.dim() == 2 and self._is_quantized(layer)
        found = self.quantize(layer, tensor) if is_quantized else [(name, tensor)]
        if self.names is not None and (lacking := [file for file, _ in found if file not in self.names]):
            raise ValueError(f"the quantized checkpoint has no tensor {lacking[0]}: take one of the model that trains, or fp8 or int4")
        return found

    def _is_quantized(self, layer: str) -> bool:
        if self.names is not None:
            return not self.names.isdisjoint(f"{layer}.{scale}" for scale in SCALES)
        return NOT_LINEAR.search(f"{layer}.weight") is None and not any(_covers(entry, layer) for entry in self.ignored)


def own_format(name: str, widths: Sequence[int], kept: Sequence[str] = ()) -> Quantization:
    """The format of a name: fp8, or int4.

    Args:
        name: the name.
        widths: columns of the matrices.
        kept: matrices besides the head that stay as they are, by their layers: some servers would quantize the routers of experts.

    Raises:
        ValueError: if there is none of this name, or the widths do not fit it.
    """
    ignored = sorted({"lm_head", *kept})
    if name == "fp8":
        layers = {"weight_block_size": list(OWN_FP8), "modules_to_not_convert": ignored}
        return format_of({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **layers})
    if name != "int4":
        raise ValueError(f"{name!r} is no format: take fp8 or int4, or the folder of a checkpoint that has a quantization_config")
    size = next((size for size in OWN_GROUPS if all(width % size == 0 for width in widths)), None)
    if size is None:
        smallest = OWN_GROUPS[-1]
        odd = next(width for width in widths if width % smallest)
        raise ValueError(f"int4 needs rows that groups of {smallest} divide, and the model has some of {odd} entries; take fp8")
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size, "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}}
    return format_of(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignored,
        }
    )


def format_of(config: Mapping[str, Any], names: frozenset[str] | None = None) -> Quantization:
    """The format that a checkpoint's configuration describes.

    Args:
        config: its `quantization_config`.
        names: names of its tensors; None: unknown.

    Raises:
        ValueError: if weights cannot be written in it.
    """
    method = config.get("quant_method")
    if method == "fp8":
        ignored = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
        if config.get("fmt", "e4m3") != "e4m3":
            raise ValueError(f"quantization_config.fmt is {config['fmt']!r}, and whet writes e4m3")
        if config.get("activation_scheme", "dynamic") != "dynamic":
            raise ValueError(f"quantization_config.activation_scheme is {config['activation_scheme']!r}: {STATIC}")
        size = config.get("weight_block_size")
        scale = "weight_scale_inv" if size else "weight_scale"
        return Quantization("fp8", config, FP8_NATS, _in_fp8(tuple(size) if size else (0, 0), scale), tuple(ignored), names)
    if method == "compressed-tensors":
        return _compressed(config, names)
    raise ValueError(
        f"quantization_config.quant_method is {method!r}, and whet writes fp8 and compressed-tensors (float-quantized, pack-quantized, "
        "int-quantized)"
    )


def _compressed(config: Mapping[str, Any], names: frozenset[str] | None) -> Quantization:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1:
        raise ValueError(f"quantization_config has {len(groups)} config_groups, and whet writes one")
    weights, kind = groups[0].get("weights") or {}, groups[0].get("format") or config.get("format")
    strategy, num_bits = weights.get("strategy"), weights.get("num_bits")
    if groups[0].get("targets") != ["Linear"]:
        raise ValueError(f"quantization_config: whet quantizes the target Linear alone, not {groups[0].get('targets')}")
    if not weights.get("symmetric", True) or weights.get("actorder") not in IN_ORDER:
        raise ValueError("quantization_config: whet quantizes symmetrically and in the order of columns (symmetric, not by actorder)")
    inputs = groups[0].get("input_activations")
    if inputs is not None and not inputs.get("dynamic"):
        raise ValueError(f"quantization_config: input_activations are not dynamic: {STATIC}")
    if (cache := config.get("kv_cache_scheme")) is not None and not cache.get("dynamic"):
        raise ValueError(f"quantization_config: kv_cache_scheme is not dynamic: {STATIC}")
    match kind, weights.get("type"), num_bits, strategy:
        case "float-quantized", "float", 8, "tensor":
            quantize = _in_fp8((0, 0), "weight_scale")
        case "float-quantized", "float", 8, "channel":
            quantize = _in_fp8((1, 0), "weight_scale")
        case "float-quantized", "float", 8, "block":
            quantize = _in_fp8(tuple(weights["block_structure"]), "weight_scale")
        case ("pack-quantized" | "int-quantized"), "int", (4 | 8), ("group" | "channel") if (kind, num_bits) != ("int-quantized", 4):
            size = weights["group_size"] if strategy == "group" else 0
            quantize = _in_integers(num_bits, size, packed=kind == "pack-quantized")
        case _:
            found = f"format {kind}, type {weights.get('type')}, {num_bits} bits, strategy {strategy}"
            raise ValueError(f"quantization_config: whet does not write {found}")
    name, nats = ("fp8", FP8_NATS) if weights.get("type") == "float" else (f"int{num_bits}", INT4_NATS if num_bits == 4 else FP8_NATS)
    return Quantization(name, config, nats, quantize, tuple(config.get("ignore") or ()), names)


def _covers(entry: str, layer: str) -> bool:
    """True if an entry of a list of layers that are left as they are is about a layer."""
    if entry.startswith("re:"):
        return re.match(entry[3:], layer) is not None
    return layer == entry or layer.startswith(entry + ".") or layer.endswith("." + entry)


def _in_fp8(block: tuple[int, ...], scale_name: str) -> QuantizeMatrix:
    """FP8 in blocks of rows and columns; 0: all of them."""

    def quantize(layer: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        rows, columns = (size or count for size, count in zip(block, weight.shape, strict=True))
        blocks = _blocks(weight.float(), rows, columns)
        scales = _scales(blocks.abs().amax((1, 3)), FP8_MAX)
        found = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
        whole = found.flatten(2, 3).flatten(0, 1)[: weight.shape[0], : weight.shape[1]].contiguous().to(FP8)
        return [(f"{layer}.weight", whole), (f"{layer}.{scale_name}", scales if block != (0, 0) else scales.reshape(()))]

    return quantize


def _in_integers(num_bits: int, group_size: int, *, packed: bool) -> QuantizeMatrix:
    """Integers in groups of a row's entries; 0: the whole row."""
    greatest = 2 ** (num_bits - 1) - 1

    def quantize(layer: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        size = group_size or weight.shape[1]
        if weight.shape[1] % size:
            raise ValueError(f"{layer}: rows of {weight.shape[1]} entries are not divided by quantization groups of {size}")
        groups = weight.float().view(len(weight), -1, size)
        scales = _scales(groups.abs().amax(2), greatest).to(weight.dtype)
        found = (groups / scales.float()[:, :, None]).round().clamp(-greatest - 1, greatest).flatten(1).to(torch.int32)
        scaled = (f"{layer}.weight_scale", scales)
        if not packed:
            return [(f"{layer}.weight", found.to(torch.int8)), scaled]
        shape = torch.tensor(weight.shape, dtype=torch.int64)
        return [(f"{layer}.weight_packed", _pack(found, num_bits)), scaled, (f"{layer}.weight_shape", shape)]

    return quantize


def _blocks(weight: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix cut into blocks, those at its ends filled up with zeros. [R, rows, C, columns]"""
    below, right = -weight.shape[0] % rows, -weight.shape[1] % columns
    whole = pad(weight, (0, right, 0, below))
    return whole.view(whole.shape[0] // rows, rows, whole.shape[1] // columns, columns)


def _scales(magnitudes: Tensor, greatest: float) -> Tensor:
    """Scales under which the greatest magnitudes are the type's greatest; 1 where all is 0."""
    return torch.where(magnitudes > 0, magnitudes / greatest, 1.0)


def _pack(values: Tensor, num_bits: int) -> Tensor:
    """Signed integers of a row, offset to be positive, in words of 32 bits, the first in the lowest bits. int32 [rows, words]"""
    per_word = 32 // num_bits
    shifted = pad(values + 2 ** (num_bits - 1), (0, -values.shape[1] % per_word)).view(len(values), -1, per_word)
    out = torch.zeros(shifted.shape[:2], dtype=torch.int32, device=values.device)
    for place in range(per_word):
        out |= shifted[:, :, place] << (num_bits * place)
    return out


def in_format(weights: Iterable[tuple[str, Tensor]], quantization: Quantization) -> Iterator[tuple[str, Tensor]]:
    """Tensors of files, quantized one after another."""
    for name, tensor in weights:
        yield from quantization.files(name, tensor)
