"""A folder's weights for a model that has none yet: headers alone tell which weights fit, and each
process reads only its part of a tensor.

Renaming, conversion (separate experts to stacked ones, for example) and tying are transformers' own
rules, so that the model is the one that `from_pretrained` gives. A single process keeps every tensor
whole; a rank of a mesh keeps the parts that its parameters' placements name.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils.loading_report import LoadStateDictInfo

from whet.model.attention import ATTENTION
from whet.model.pieces import Files, InFile, KeptIndices, Piece, converted

ModuleTensor = tuple[nn.Module, str]
"""A module, and the name of one of its tensors."""


def without_tensors(auto: Any, hf_config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool) -> PreTrainedModel:
    """A model of a transformers auto class that has shapes and types, and no contents."""
    with torch.device("meta"):
        hf: PreTrainedModel = auto.from_config(
            deepcopy(hf_config), attn_implementation=ATTENTION, dtype=dtype, trust_remote_code=trust_remote_code
        )
    return hf.eval()


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor of the model that waits for its contents."""

    names: tuple[str, ...]
    """More than one, where it is tied."""
    places: tuple[ModuleTensor, ...]
    pieces: tuple[Piece, ...]
    """More than one, where files have it under several of its names: they must be equal."""
    dtype: torch.dtype
    """As the model computes with it; what is kept of it may be wider."""


class Contents:
    """The weights in a folder's files for a model without contents.

    Args:
        hf: as `without_tensors` makes it, or one that already has some contents: these stay.
        folder: in Hugging Face format.
        headless: True if the files are of a language model, and the model is its decoder with another
            head.

    Raises:
        ValueError: if a file is missing or damaged, the weights are not in safetensors files, or they
            are quantized.
    """

    def __init__(self, hf: PreTrainedModel, folder: Path, *, headless: bool = False) -> None:
        if hf.config.to_dict().get("quantization_config") is not None:
            raise ValueError(f"{folder} holds quantized weights (quantization_config in config.json); use the model in bfloat16")
        self.folder = folder
        self._hf, self._files = hf, Files(folder)
        self._slots: list[TensorSlot] = []
        self._unfit: dict[str, str] = {}
        pieces, unknown = self._pieces()
        dtypes = _dtypes(hf)
        names: dict[int, list[str]] = {}
        own = hf.state_dict(keep_vars=True)
        for name, tensor in own.items():
            if tensor.is_meta:
                names.setdefault(id(tensor), []).append(name)
        lacking = {tied[0] for tied in names.values() if not any(name in pieces or name in self._unfit for name in tied)}
        for tied in names.values():
            self._add(tied, own[tied[0]], [pieces[name] for name in tied if name in pieces], dtypes[tied[0]])
        report = LoadStateDictInfo(set(), unknown, set(), [], {}, set())
        hf._adjust_missing_and_unexpected_keys(report)
        inside = f"{hf.base_model_prefix}."
        self.missing = tuple(sorted(name for name in lacking if name.startswith(inside) or not headless))
        """Tensors of the model that no file gives. Tied ones are given by what they are tied to."""
        self.misfits = tuple(f"{name}{words}" for name, words in sorted(self._unfit.items()))
        """`name: its shape, not the model's (file)`, and what cannot be put together (fused experts that lack one, say)."""
        unused = (name for name in report.unexpected_keys if name.startswith(inside) or not headless)
        self.unused = tuple(f"{name} ({self._files.headers[name][0].name})" for name in sorted(unused))
        """Tensors of the files that the model has no place for."""

    @property
    def headers(self) -> Mapping[str, Tensor]:
        """Shape and type of each tensor in the files."""
        return {name: header for name, (_, header) in self._files.headers.items()}

    def check(self, key: str) -> None:
        """Refuse what would have to be made up, or left out.

        Args:
            key: the setting that named the folder.

        Raises:
            ValueError: with the tensors that the files lack, that have other shapes, or that the model has no place for.
        """
        for found, what in (
            (self.missing, "lack {} that its config.json asks for, among them"),
            (self.misfits, "have {} of other shapes than its config.json asks for, among them"),
            (self.unused, "have {} that the model of its config.json has no place for, among them"),
        ):
            if found:
                count = what.format(f"{len(found)} tensors")
                raise ValueError(
                    f"{key}: the weights in {self.folder} {count} {', '.join(found[:3])}; they are of another model or incomplete; copy or "
                    "download the whole model there"
                )

    @torch.no_grad()
    def fill(self, device: torch.device, computes_on: torch.device) -> None:
        """Read what this process keeps of each tensor, one tensor after another, and put it in the place of what has no contents.

        Args:
            device: device of the parameters afterwards.
            computes_on: device of the buffers afterwards.

        Raises:
            ValueError: if a file is damaged, or tensors that the model ties differ.
        """
        with self._files.opened():
            for slot in self._slots:
                module, key = slot.places[0]
                old = getattr(module, key)
                kept = kept_of(old)
                first, *others = (piece.read(kept).to(slot.dtype) for piece in slot.pieces)
                if any(not torch.equal(first, other) for other in others):
                    raise ValueError(
                        f"{self.folder}: config.json ties {' and '.join(slot.names)}, but the files have two different tensors there; set "
                        "tie_word_embeddings=false in config.json, or take one of them out"
                    )
                where = device if isinstance(old, nn.Parameter) else computes_on
                own = torch.empty(first.shape, dtype=torch.promote_types(old.dtype, slot.dtype), device=where)
                new = _in_place_of(old, own.copy_(first))  # a copy, since what is read may be the file itself, mapped
                for each, name in slot.places:
                    setattr(each, name, new)

    def _pieces(self) -> tuple[dict[str, Piece], set[str]]:
        """Source of each of the model's tensors, and the names in files that none of them has."""
        rules = get_model_conversion_mapping(self._hf)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        rule_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        own, prefix = self._hf.state_dict(), self._hf.base_model_prefix
        pieces: dict[str, Piece] = {}
        made: dict[str, dict[str, list[InFile]]] = {}
        unknown: set[str] = set()
        for name in sorted(self._files.headers, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, own)
            if target not in own and name in own:
                target, pattern = rename_source_key(name, [], [], prefix, own)
            if target not in own:
                unknown.add(name)
            elif pattern is None:
                pieces[target] = InFile(self._files, name)
            else:
                made.setdefault(target, {}).setdefault(pattern, []).append(InFile(self._files, name))
        for target, sources in made.items():
            try:
                pieces |= converted(self._hf, rule_of[next(iter(sources))], target, sources)
            except Exception as error:  # transformers' rules raise what tensors of other shapes make of them
                first = next(iter(sources.values()))[0]
                self._unfit[target] = f": {str(error).strip().partition(chr(10))[0][:200]} ({first.source})"
        used = [rule for rule in rules if rule.was_used()]
        self._hf._weight_conversions = used  # pyright: ignore[reportArgumentType] (by which save_pretrained finds the way back)
        return pieces, unknown

    def _add(self, names: list[str], tensor: Tensor, pieces: list[Piece], dtype: torch.dtype) -> None:
        """Note a tensor's place, or why its pieces do not fit."""
        for piece in pieces:
            if piece.shape != tuple(tensor.shape):
                self._unfit[names[0]] = f": {piece.shape}, not {tuple(tensor.shape)} ({piece.source})"
                return
        if pieces:
            places = tuple((self._hf.get_submodule(owner), key) for owner, _, key in (name.rpartition(".") for name in names))
            self._slots.append(TensorSlot(tuple(names), places, tuple(pieces), dtype))


def kept_of(tensor: Tensor) -> KeptIndices:
    """The indices that this process keeps of a tensor in each of its dimensions: all, where it is not spread over ranks."""
    if not isinstance(tensor, DTensor):
        return [torch.arange(size) for size in tensor.shape]
    kept: list[Tensor] = []
    for dim, size in enumerate(tensor.shape):
        placements = [_along(placement, dim, tensor.dim()) for placement in tensor.placements]
        indices = distribute_tensor(torch.arange(size), tensor.device_mesh, placements, src_data_rank=None)
        kept.append(indices.to_local().cpu())
    return kept


def _along(placement: Placement, dim: int, num_dims: int) -> Placement:
    """The effect of a placement on the indices of one dimension."""
    if isinstance(placement, Shard | _StridedShard) and placement.dim % num_dims == dim:
        return _StridedShard(0, split_factor=placement.split_factor) if isinstance(placement, _StridedShard) else Shard(0)
    return Replicate()


def _in_place_of(old: Tensor, local: Tensor) -> Tensor:
    """A parameter, or a buffer, like another one but with contents."""
    found = local
    if isinstance(old, DTensor):
        # `from_local` would move a part that is kept on the CPU to the mesh's devices.
        meta = TensorMeta(old.shape, tuple(old.stride()), local.dtype)
        found = DTensor(local, DTensorSpec(old.device_mesh, old.placements, tensor_meta=meta), requires_grad=False)
    return nn.Parameter(found, old.requires_grad) if isinstance(old, nn.Parameter) else found


def _dtypes(hf: PreTrainedModel) -> dict[str, torch.dtype]:
    """The type of each of the model's tensors as transformers would load it: it keeps some in float32
    for any requested type."""
    own = hf.state_dict()
    kept: dict[str, torch.dtype] = hf._get_dtype_plan(hf.dtype)
    if not kept:
        return {name: tensor.dtype for name, tensor in own.items()}
    pattern, group, _ = build_glob_alternation(list(kept))
    found = {name: pattern.search(name) for name in own}
    return {name: own[name].dtype if match is None else kept[group[str(match.lastgroup)]] for name, match in found.items()}


def settle_rest(hf: PreTrainedModel, folder: Path) -> None:
    """Set the parts of a model that no file of weights has: buffers that it computes, and its settings
    of generation."""
    for name, buffer in hf.named_non_persistent_buffers():
        owner, _, key = name.rpartition(".")
        setattr(hf.get_submodule(owner), key, torch.empty_like(buffer, device="cpu"))
    for tensor in hf.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue] (so transformers leaves it alone)
    with torch.random.fork_rng(devices=[]):
        hf.initialize_weights()
    if hf.can_generate() and (folder / "generation_config.json").is_file():
        hf.generation_config = GenerationConfig.from_pretrained(folder)
