"""A dense model's parameters as servers hold them: q, k and v together, gate and up together, each process its slice.

vLLM tells the SHA-256 of each parameter in this layout (`/weight_checker`), so the trainer can compute the same from its own weights.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KEY = re.compile(r"dp(\d+):pp(\d+):pcp(\d+):tp(\d+):(.+)")
NOTHING = hashlib.sha256(b"").hexdigest()
"""Digest of a parameter that was replaced by a packed copy: no proof of anything."""
VOCABULARY_MULTIPLE = 64
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
BY_COLUMN = ("o_proj.weight", "down_proj.weight")
BY_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")
WHOLE = ("norm.weight", "layernorm.weight", "o_proj.bias", "down_proj.bias")
CutTensor = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of an attention."""

    num: int
    num_kv: int
    dim: int

    @classmethod
    def of(cls, config: Any) -> Heads:
        """From a Hugging Face configuration."""
        num = int(config.num_attention_heads)
        dim = getattr(config, "head_dim", None) or config.hidden_size // num
        return cls(num, int(getattr(config, "num_key_value_heads", None) or num), int(dim))


def expected(weights: Iterable[tuple[str, Tensor]], heads: Heads, answered: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """The digests that servers may tell of parameters whose layout is known.

    Args:
        weights: the trainer's, named as in Hugging Face files. Read once.
        heads: the model's.
        answered: the servers' SHA-256 of each parameter, by `dp0:pp0:pcp0:tp0:NAME`.

    Returns: by the same keys the digest in the type of the weights, and where a server answered another one also those of the weights
        rounded to bfloat16 and float16, which it may compute in.
    """
    usable = {match[0]: match for key in answered if NOTHING not in answered[key] and (match := KEY.fullmatch(key))}
    size = 1 + max((int(match[4]) for match in usable.values()), default=0)
    wanted: dict[str, list[_Parameter]] = {}
    for key, match in usable.items():
        parameter = _Parameter.of(key, match[5], int(match[4]), size, heads)
        if parameter is not None:
            for file in parameter.cuts:
                wanted.setdefault(file, []).append(parameter)
    out: dict[str, set[str]] = {}
    for file, tensor in weights:
        for parameter in wanted.pop(file, ()):
            part = parameter.cuts[file](tensor.detach())
            parameter.parts[file] = part.clone() if len(parameter.cuts) > 1 else part  # a stream may use its memory again
            if len(parameter.parts) == len(parameter.cuts):
                out[parameter.key] = parameter.digests(answered[parameter.key])
                parameter.parts.clear()
    return out


@dataclass(slots=True)
class _Parameter:
    """One process's parameter, put together from tensors of files."""

    key: str
    cuts: Mapping[str, CutTensor]
    """The part of each tensor, in the order that they are put together in."""
    parts: dict[str, Tensor]

    @classmethod
    def of(cls, key: str, name: str, rank: int, size: int, heads: Heads) -> _Parameter | None:
        """None: its layout is not known."""
        name = name.replace(".base_layer.", ".")  # below an adapter
        module, _, kind = name.rpartition(".")
        stem, _, last = module.rpartition(".")
        if last in FUSED:
            return cls(key, {f"{stem}.{part}.{kind}": _rows(part, rank, size, heads) for part in FUSED[last]}, {})
        if name.endswith(BY_VOCABULARY):
            return cls(key, {name: lambda tensor: _vocabulary(tensor, rank, size)}, {})
        if name.endswith(BY_COLUMN):
            return cls(key, {name: lambda tensor: tensor.chunk(size, 1)[rank]}, {})
        if name.endswith(WHOLE):
            return cls(key, {name: lambda tensor: tensor}, {})
        return None

    def digests(self, answered: Collection[str]) -> set[str]:
        """As `expected`."""
        parts = [self.parts[file] for file in self.cuts]
        own = _sha256(parts, parts[0].dtype)
        if set(answered) <= {own}:
            return {own}
        return {own, _sha256(parts, torch.bfloat16), _sha256(parts, torch.float16)}


def _rows(part: str, rank: int, size: int, heads: Heads) -> CutTensor:
    """A process's rows of a projection; heads of keys and values that are fewer than processes are at several of them."""
    if part not in ("k_proj", "v_proj"):
        return lambda tensor: tensor.chunk(size)[rank]
    if size <= heads.num_kv:
        return lambda tensor: tensor.chunk(size)[rank]
    place = rank // (size // heads.num_kv)
    return lambda tensor: tensor[place * heads.dim : (place + 1) * heads.dim]


def _vocabulary(tensor: Tensor, rank: int, size: int) -> Tensor:
    """A process's rows of a vocabulary that is padded with zeros."""
    padded = -(-len(tensor) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    each = padded // size
    rows = tensor[rank * each : (rank + 1) * each]
    return torch.cat([rows, rows.new_zeros(each - len(rows), tensor.shape[1])]) if len(rows) < each else rows


def _sha256(parts: Iterable[Tensor], dtype: torch.dtype) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part.to(dtype).cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
