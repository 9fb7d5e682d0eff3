"""The memory plan of one rank of a mesh: what it keeps is cut by the model's plan and sharded, what it
computes with is put together.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from whet.model.causal import CausalModel
from whet.model.config import ModelConfig
from whet.model.decoder import DecoderModel
from whet.model.freezing import freeze
from whet.model.lora import add_adapter
from whet.model.meta import meta_like
from whet.model.parallel_plan import Cut, cuts_of, layers_of
from whet.model.scalar import ScalarModel
from whet.plan.memory import (
    ALWAYS,
    MemoryPlan,
    Part,
    Phase,
    Workload,
    engine_parts,
    learned_dtype,
    optimizer_bytes,
    optimizer_parts,
    update_parts,
)
from whet.plan.traffic import REDUCED_BYTES, ParameterGroups, groups_of, own_size
from whet.train.torch_native.config import ParallelConfig, TrainConfig, check_compiled, rows_per_chunk
from whet.train.torch_native.mesh_ranks import attention_of, head_size
from whet.train.torch_native.optim import IN_A_LAYER

Planned = CausalModel | ScalarModel
"""A model that is planned."""
PASSES: tuple[Phase, ...] = ("loss", "backward")
FEW = (2, 3)
"""Layers that are counted of many that are alike."""
CUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Settings of a model that the ranks of `tensor` share, as far as it has them."""


class MeshPlanner:
    """Plans a model's layouts.

    Where a model's layers are alike, few of them are counted and the rest follows: every part grows by the
    same with each layer.

    Args:
        model: whole, on the meta device; with its adapter, if it has one.
        config: type and device of the model.
        key: the setting that its degrees come from, for what is advised.
    """

    def __init__(self, model: Planned, config: ModelConfig, key: str = "train.parallel") -> None:
        self.model, self.config, self._key = model, config, key
        shapes = {tuple(tuple(p.shape) for p in layer.parameters()) for layer in layers_of(model.hf)}
        self._depth = len(layers_of(model.hf))
        self._few = FEW if len(shapes) == 1 and self._depth > max(FEW) else ()
        self._groups: dict[tuple[int, int], ParameterGroups] = {}
        self._cut: dict[int, Planned] = {}
        self._passed: dict[tuple[int, int, tuple[int, ...]], list[Part]] = {}

    def groups(self, degrees: ParallelConfig) -> ParameterGroups:
        """`groups_of` the whole model.

        Raises:
            ValueError: if the model has no plan for the degrees.
        """
        key = (degrees.tensor, degrees.expert)
        if key not in self._groups:
            self._groups[key] = groups_of(self.model, degrees)
        return self._groups[key]

    def plan(self, work: Workload, degrees: ParallelConfig) -> MemoryPlan:
        """Plan of the first rank, which holds the most: the engine is in its process.

        Args:
            work: work with the model; `lengths` are of a row that the ranks of `context` share. All
                calls must agree in everything else.
            degrees: the degrees that the model is spread by.

        Raises:
            ValueError: if the model has no plan for the degrees, or its sizes do not divide.
        """
        if not self._few:
            return self._plan(self.model, work, degrees)
        less, more = (self._plan(self._with_layers(num, work), work, degrees) for num in self._few)
        left = self._depth - self._few[1]
        grown = [
            replace(b, size_bytes=b.size_bytes + left * (b.size_bytes - a.size_bytes)) for a, b in zip(less.parts, more.parts, strict=True)
        ]
        return MemoryPlan(tuple(grown))

    def _plan(self, model: Planned, work: Workload, degrees: ParallelConfig) -> MemoryPlan:
        computed = model.dtype.itemsize
        trains = any(p.requires_grad for p in model.hf.parameters())
        kept = local_tensors(model, degrees, learned_dtype(model) if trains else model.dtype)
        trained = {name: p for name, p in kept.items() if p.requires_grad}
        layer, rest = put_together(model, degrees)
        held = 0 if work.offloaded else sum(p.nbytes for p in kept.values())
        parts = [
            Part("parameters", held, ALWAYS, f"raise {self._key}.shard, or choose a smaller model"),
            *optimizer_parts(trained, work),
            Part("layers put together", 2 * layer * computed, PASSES, f"raise {self._key}.tensor or expert", estimate=True),
            Part("embedding and head put together", rest * computed, PASSES, f"raise {self._key}.tensor", estimate=True),
        ]
        if len(trained) == len(kept):
            whole = layer * (computed + REDUCED_BYTES * (computed < REDUCED_BYTES))
            parts.append(Part("a layer's gradient, whole", whole, ("backward",), f"raise {self._key}.tensor", estimate=True))
        if work.train.optim.name == "muon" and not work.offloaded:
            matrices = {name: p for name, p in model.hf.named_parameters() if p.requires_grad and p.dim() == 2 and IN_A_LAYER.search(name)}
            name = max(matrices, key=lambda name: matrices[name].numel())
            alone = optimizer_bytes({name: torch.empty_like(matrices[name], dtype=learned_dtype(model))}, work.train)
            parts.append(Part("a matrix put together", alone.scratch, ("step",), "use adamw", estimate=True))
        if work.reference and model.adapter is None:
            frozen = 0 if work.offloaded else sum(p.numel() for p in kept.values()) * computed
            parts.append(Part("reference model", frozen, ALWAYS, work.reference_advice))
        if work.sampling is not None:
            assert isinstance(model, CausalModel), "only a language model samples"
            engine = sum(p.nbytes for p in model.hf.parameters())
            parts.append(Part("engine weights", engine, ALWAYS, "choose a smaller model: the first process holds the engine's, whole"))
            parts += engine_parts(model, work.sampling)
        return MemoryPlan((*parts, *self._passes(model, work, degrees)))

    def _passes(self, model: Planned, work: Workload, degrees: ParallelConfig) -> list[Part]:
        """Memory of the passes over a rank's part of the largest row, counted on the model that the
        rank computes."""
        chunk = rows_per_chunk(work.train, model.vocab_size)
        lengths = work.lengths if degrees.context == 1 else (-(-sum(work.lengths) // degrees.context),)
        key = (len(layers_of(model.hf)), degrees.tensor, lengths)
        if key not in self._passed:
            own = replace(work, lengths=lengths, train=work.train.model_copy(update={"logprob_chunk_tokens": chunk}))
            computed = model if degrees.tensor == 1 else rank_model(model, self.config, degrees.tensor)
            if computed is not model and work.train.lora is not None:
                add_adapter(computed, work.train.lora)
            self._passed[key] = update_parts(computed, own)
        return self._passed[key]

    def _with_layers(self, num: int, work: Workload) -> Planned:
        """The same model with `num` layers."""
        if num not in self._cut:
            shape = copy.deepcopy(self.model.config)
            text = shape.get_text_config()
            for key, value in vars(text).items():
                if isinstance(value, list) and len(value) == self._depth:  # one entry for each layer
                    setattr(text, key, value[:num])
            text.num_hidden_layers = num
            cut = self._cut[num] = meta_like(self.model, shape, self.config)
            if work.train.lora is not None:
                add_adapter(cut, work.train.lora)
            if work.train.freeze:
                with suppress(ValueError):  # a name of a layer that is cut off: the estimate has the others train
                    freeze(cut.hf, work.train.freeze)
        return self._cut[num]


def local_tensors(model: DecoderModel, degrees: ParallelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """The part of each parameter that a rank keeps between passes, without contents, by name. If it
    does not divide, the largest part.

    Raises:
        ValueError: if the model has no plan for the degrees.
    """
    cuts = cuts_of(model.hf, degrees.tensor, degrees.expert, split_head=isinstance(model, CausalModel))
    out: dict[str, Tensor] = {}
    for name, p in model.hf.named_parameters():
        shape, cut = list(p.shape), cuts[name]
        shape[cut.dim] = -(-shape[cut.dim] // cut.parts)
        shape[0] = -(-shape[0] // _sharded_over(degrees, cut))
        out[name] = torch.empty(shape, dtype=dtype, device="meta", requires_grad=p.requires_grad)
    return out


def _sharded_over(degrees: ParallelConfig, cut: Cut) -> int:
    block = degrees.shard * degrees.context
    return block * degrees.tensor // degrees.expert if cut.of_experts else block


def put_together(model: DecoderModel, degrees: ParallelConfig) -> tuple[int, int]:
    """Entries of the largest layer, cut by the model's plan alone, and of what no layer has."""
    cuts = cuts_of(model.hf, degrees.tensor, degrees.expert, split_head=isinstance(model, CausalModel))
    names = {p: name for name, p in model.hf.named_parameters()}
    sizes = [sum(own_size(p, cuts[names[p]]) for p in layer.parameters()) for layer in layers_of(model.hf)]
    return max(sizes, default=0), groups_of(model, degrees).rest


def check_spread(name: str, model: Planned, degrees: ParallelConfig, train: TrainConfig, key: str = "train.parallel") -> None:
    """Refuse degrees that a model cannot be spread by, alone or with the run's other settings.

    Args:
        name: the model's name.
        model: without contents.
        degrees: its own, or the policy's.
        train: the run's settings.
        key: the setting that the degrees come from.

    Raises:
        ValueError: with the model, the setting, and advice.
    """
    try:
        if train.compile:
            check_compiled(degrees, key)
        check_divides(model, degrees.tensor, key)
        cuts_of(model.hf, degrees.tensor, degrees.expert, split_head=isinstance(model, CausalModel), key=key)
        gathers = attention_of(model, degrees, key) == "gather"
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if train.rows == "forest" and degrees.context > 1 and gathers:
        raise ValueError(
            f"{name}: train.rows is forest, but with {key}.context={degrees.context} ranks gather keys and values, and attend in chains; "
            "use chains"
        )


def check_divides(model: Planned, tensor: int, key: str = "train.parallel") -> None:
    """Refuse widths that `tensor` ranks cannot share; `key` is the setting that their number comes
    from.

    Raises:
        ValueError: with the model's width.
    """
    known = model.config.get_text_config().to_dict()
    for width in CUT:
        if known.get(width) is not None and known[width] % tensor:
            raise ValueError(f"{key}: {type(model.hf).__name__} has {width}={known[width]}, which {tensor} ranks cannot share")


def rank_model(model: Planned, config: ModelConfig, tensor: int) -> Planned:
    """The model that each of `tensor` ranks computes: a share of heads, widths and vocabulary; without
    contents.

    Raises:
        ValueError: if the heads do not divide.
    """
    check_divides(model, tensor)
    shape = copy.deepcopy(model.config)
    text = shape.get_text_config()
    size, known = head_size(model), text.to_dict()
    for width in CUT:
        if known.get(width) is not None:
            setattr(text, width, known[width] // tensor)
    text.head_dim = size
    text.vocab_size = -(-text.vocab_size // tensor)
    text.pad_token_id = None  # it might lie outside of a rank's vocabulary
    return meta_like(model, shape, config)
