"""Low-rank adapters (LoRA, arXiv 2106.09685) on a model's linear layers, by peft: trained tensors on a
base that does not change."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from whet.model.causal import CausalModel
from whet.model.config import LoraConfig
from whet.model.decoder import DecoderModel
from whet.model.digest import digests_of
from whet.model.scalar import ScalarModel
from whet.model.shards import spread_like, whole

ADAPTER = "default"
"""peft's name of the only adapter."""
PREFIX = "base_model.model."
"""Prefix of every name in peft's files."""
FILE = "adapter_model.safetensors"
BASE = "base_layer."


class Adapter:
    """The adapter of a model.

    Args:
        model: model that it was put on.
        config: how.
        layers: peft's layers, by the names of the modules whose places they took.
        peft_config: peft's own description, for files.
    """

    def __init__(self, model: DecoderModel, config: LoraConfig, layers: Mapping[str, Any], peft_config: Any) -> None:
        self.config = config
        self._model, self._layers, self._peft_config = model, layers, peft_config
        self._base: str | None = None
        self._dtypes = {name: p.dtype for name, p in model.hf.named_parameters() if not p.requires_grad}  # a mesh keeps them in float32

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return scale_of(self.config.alpha, self.config.rank, rslora=self.config.rslora)

    def check_scale(self, scale: float, source: Path) -> None:
        """Refuse an adapter that was trained with another scale: it would be another model.

        Raises:
            ValueError: naming both.
        """
        if scale != self.scale:
            raise ValueError(
                f"{source} has an adapter that was trained with the scale {scale:g}, and train.lora has {self.scale:g} (alpha / rank, of "
                "rslora alpha / sqrt(rank)): set alpha and rslora to what it was trained with"
            )

    def tensors(self) -> dict[str, Tensor]:
        """Trained tensors, by their names in peft's files."""
        named = self._model.hf.named_parameters()
        return {PREFIX + name.replace(f".{ADAPTER}.", "."): p for name, p in named if p.requires_grad}

    def merged(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors with the adapter added, under the names that they have without one."""
        for name, tensor in self.without(named):
            owner = name.removesuffix(".weight")
            yield name, (tensor + spread_like(self._added(owner), tensor)).to(tensor.dtype) if owner in self._layers else tensor

    def without(self, named: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors without the adapter, under the names that they have without one."""
        for name, tensor in named:
            if not name.rpartition(".lora_")[1]:
                yield name.replace("." + BASE, "."), tensor

    def _added(self, owner: str) -> Tensor:
        """The whole tensor that a layer's adapter adds to its weight: B A, scaled, in float32 at least."""
        layer = self._layers[owner]
        a, b = (whole(part[ADAPTER].weight.detach()) for part in (layer.lora_A, layer.lora_B))
        dtype = torch.promote_types(a.dtype, torch.float32)
        return b.to(dtype) @ a.to(dtype) * layer.scaling[ADAPTER]

    def merge(self) -> None:
        """Add the adapter to the weights in place and take its layers out: the model has no adapter any more."""
        with torch.no_grad():
            for name, layer in self._layers.items():
                plain = layer.get_base_layer()
                plain.weight.copy_((plain.weight + self._added(name)).to(plain.weight.dtype))
                owner, _, own = name.rpartition(".")
                setattr(self._model.hf.get_submodule(owner), own, plain)
        self._model.adapter = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base alone, inside."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def base_digest(self) -> str:
        """Digest of the frozen weights."""
        if self._base is None:
            named = self._model.hf.named_parameters()
            frozen = ((n, whole(p).to(self._dtypes[n])) for n, p in named if not p.requires_grad)  # one at a time is whole
            self._base = hashlib.sha256(repr(sorted(digests_of(frozen).items())).encode()).hexdigest()
        return self._base

    def describe(self, folder: Path, base: str) -> None:
        """Write peft's adapter_config.json; `base` is the path of the base model."""
        self._peft_config.base_model_name_or_path = base
        self._peft_config.inference_mode = True
        self._peft_config.save_pretrained(folder)

    def read(self, path: Path) -> None:
        """Take over an adapter's file, with its `adapter_config.json` in the same folder.

        Raises:
            ValueError: if it is of another adapter.
        """
        found, own = load_file(path), self.tensors()
        shapes, wanted = ({name: tensor.shape for name, tensor in each.items()} for each in (found, own))
        wrong = sorted(name for name in shapes.keys() | wanted.keys() if shapes.get(name) != wanted.get(name))
        if wrong:
            raise ValueError(f"{path} is of another adapter: {len(wrong)} tensors differ, among them {', '.join(wrong[:3])}")
        described = json.loads((path.parent / "adapter_config.json").read_text())
        self.check_scale(scale_of(described["lora_alpha"], described["r"], rslora=described["use_rslora"]), path)
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(found[name])


def scale_of(alpha: float, rank: int, *, rslora: bool) -> float:
    """Factor of an adapter's B A."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def add_adapter(model: DecoderModel, config: LoraConfig) -> Adapter:
    """Put a new adapter on a model in place, freeze the rest (but a score head), and note it in `model.adapter`.

    What is random is drawn from torch's generator.

    Raises:
        ValueError: peft is not installed, or there is no such layer.
    """
    require_peft()
    import peft
    from peft.tuners.lora import LoraLayer

    assert model.adapter is None, "a model has one adapter"
    scalar = isinstance(model, ScalarModel)
    head = _head_name(model)
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=cast(int, config.alpha),
        target_modules=config.target_modules,
        exclude_modules=[head],
        use_rslora=config.rslora,
        init_lora_weights=True if config.init == "kaiming" else "gaussian",
        task_type="SEQ_CLS" if scalar else "CAUSAL_LM",
    )
    if config.target_modules == "all-linear":
        peft_config.target_modules = [name for name, m in model.hf.named_modules() if isinstance(m, nn.Linear) and name != head]
        _leave_experts(peft_config, model.hf)
    bare = next(model.hf.parameters()).is_meta
    model.hf.requires_grad_(False)
    try:
        peft.inject_adapter_in_model(peft_config, model.hf, ADAPTER, low_cpu_mem_usage=bare)
    except ValueError as error:
        name = type(model.hf).__name__
        raise ValueError(f"train.lora.target_modules = {config.target_modules!r} does not fit {name}: {error}") from error
    layers = {name: module for name, module in model.hf.named_modules() if isinstance(module, LoraLayer)}
    odd = [name for name, module in layers.items() if not isinstance(module.get_base_layer(), nn.Linear)]
    if odd:
        raise ValueError(f"train.lora.target_modules names {odd[0]}, which is no linear layer; name linear layers, or use all-linear")
    if model.contents is not None:
        for layer in layers.values():
            _draw(layer, peft_config.init_lora_weights, model.dtype)
    if scalar:
        model.head.requires_grad_(True)
        peft_config.modules_to_save = [head]
    peft_config.target_modules = sorted(layers)
    adapter = model.adapter = Adapter(model, config, layers, peft_config)
    return adapter


def _draw(layer: Any, init: Any, dtype: torch.dtype) -> None:
    """Give a layer's new adapter without contents its initial weights, drawn as peft draws them for an
    adapter with contents."""
    parts = [each[ADAPTER].to_empty(device="cpu") for each in (layer.lora_A, layer.lora_B)]
    for part in parts:
        part.reset_parameters()
    layer.reset_lora_parameters(ADAPTER, init)
    for part in parts:
        part.weight.data = part.weight.data.to(dtype).float()


def _leave_experts(peft_config: Any, hf: nn.Module) -> None:
    """Drop the layers whose names peft gives to fused experts: otherwise it would put an adapter there,
    and so would every reader of the file."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(peft_config, hf, None)
    peft_config.target_parameters = None
    peft_config.rank_pattern, peft_config.alpha_pattern = {}, {}


def require_peft() -> None:
    """Check that peft is installed.

    Raises:
        ValueError: if it is not.
    """
    if find_spec("peft") is None:
        raise ValueError("train.lora needs the peft package: pip install 'whet[lora]', or leave train.lora out")


def _head_name(model: DecoderModel) -> str:
    """The name of the layer behind the hidden states: it is projected to in pieces, so it has no adapter."""
    assert isinstance(model, CausalModel | ScalarModel)
    head = model.head if isinstance(model, ScalarModel) else model.lm_head
    return next(name for name, module in model.hf.named_modules() if module is head)
