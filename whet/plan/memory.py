"""The memory plan: bytes on a device by part, before anything is allocated.

The parts are not formulas: the run's own code (optimizer, packed rows, chunked log-probs, cache) works on
tensors without contents, on the meta device, and what it makes is counted. So a change in that code changes
the plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from whet.core.logprobs import Nucleus, chunked_logprobs
from whet.engine.embedded.cache import KVStore
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.rows import DecodeSlab, capacity_for
from whet.engine.embedded.sampler import sample
from whet.model.causal import CausalModel
from whet.model.decoder import DecoderModel
from whet.model.recompute import recomputes
from whet.plan.activations import META, activation_bytes, drop_gradient, trained_weights
from whet.plan.live import LiveBytes
from whet.train.torch_native.config import TrainConfig, rows_per_chunk
from whet.train.torch_native.optim import Optimizer
from whet.types import SamplingParams

Phase = Literal["rollout", "loss", "backward", "step", "critic", "frozen"]
"""rollout: while it samples; loss: while log-probs are computed and differentiated; backward: in the layers'
backward pass; step: in the optimizer's step; critic: while the critic learns, at its worst moment; frozen:
while a reference or a teacher computes.
"""
ALWAYS: tuple[Phase, ...] = ("rollout", "loss", "backward", "step", "critic", "frozen")
TRAINING: tuple[Phase, ...] = ("loss", "backward", "step")
PHASES: dict[Phase, str] = {
    "rollout": "sampling",
    "loss": "log-probs",
    "backward": "backward",
    "step": "step",
    "critic": "critic",
    "frozen": "reference or teacher",
}
"""In words."""
DRAW_VOCAB = 257
"""Vocabulary of the small draw that measures the bytes of sampling for each logit; a prime, so that
nothing else has this width."""


@dataclass(frozen=True, slots=True)
class Part:
    """Something that a run holds on its device."""

    name: str
    size_bytes: int
    during: tuple[Phase, ...]
    advice: str = ""
    """Advice on how to make the part smaller."""
    estimate: bool = False
    """Not exact: what the model's layers keep depends on kernels and lengths."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of a run on one device."""

    parts: tuple[Part, ...]

    def at(self, phase: Phase) -> int:
        """Bytes held at a time in a phase."""
        return sum(part.size_bytes for part in self.parts if phase in part.during)

    @property
    def peak(self) -> Phase:
        """The phase that holds the most."""
        return max(ALWAYS, key=self.at)

    @property
    def peak_bytes(self) -> int:
        return self.at(self.peak)

    def largest(self, count: int) -> list[Part]:
        """The largest parts at the peak."""
        held = [part for part in self.parts if self.peak in part.during and part.size_bytes]
        return sorted(held, key=lambda part: -part.size_bytes)[:count]

    def bytes_of(self, name: str) -> int:
        return sum(part.size_bytes for part in self.parts if part.name == name)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Work of the embedded engine."""

    engine: EmbeddedConfig
    params: tuple[SamplingParams, ...]
    """The ways in which training and evaluation sample."""
    rows: int
    """Sequences that get a token in one step, at most."""
    longest: int
    """Tokens of the longest sequence."""
    together: int = 1
    """Trajectories of a rollout or an evaluation: as many may wait for their rewards."""
    overlaps: bool = False
    """True if it samples while the trainer computes."""
    sleeps: bool = False
    """True if it frees its caches while the trainer computes."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Work of a run with its model, as far as it takes memory."""

    train: TrainConfig
    lengths: tuple[int, ...]
    """Tokens of the samples in the largest row."""
    entropy_grad: bool = False
    nucleus: bool = False
    """True if log-probs are over each token's nucleus."""
    reference: bool = False
    """True if a frozen copy of the first policy is kept."""
    reference_advice: str = "choose a smaller model"
    """Advice on how to do without the copy."""
    sampling: Sampling | None = None
    """None: a supervised run."""
    offloaded: bool = False
    """True if the optimizer's tensors are kept in another memory (`train.offload`)."""

    @property
    def num_predicting(self) -> int:
        """Tokens of the row that have a predecessor, so that they may train."""
        return sum(self.lengths) - len(self.lengths)


def largest_row(longest: tuple[int, ...], budget: int, num_units: int) -> tuple[int, ...]:
    """Lengths of the samples in a row that is packed as full as it can be: a unit over the budget sits alone.

    Args:
        longest: lengths of the largest unit's samples: one sample, or the two of a preference pair.
        budget: tokens of a row.
        num_units: units of a step.
    """
    size = sum(longest)
    whole = min(max(budget // size, 1), num_units)
    rest = budget - whole * size
    return longest * whole + ((rest,) if rest > 0 and whole < num_units else ())


def plan_memory(model: DecoderModel, work: Workload) -> MemoryPlan:
    """The plan of a run.

    Args:
        model: on the meta device, as `meta_causal` makes it.
        work: workload of the model.

    Raises:
        ValueError: if the model cannot run through whet's attention.
    """
    weights = sum(p.nbytes for _, p in model.named_weights())
    smaller = "choose a smaller model, or model.dtype=bfloat16"
    parts = [Part("parameters", weights, ALWAYS, smaller), *optimizer_parts(trained_weights(model), work)]
    if work.reference and model.adapter is None:
        parts.append(Part("reference model", weights, ALWAYS, work.reference_advice))
    if work.sampling is not None:
        adapter = 0 if model.adapter is None else sum(p.nbytes for p in trained_weights(model).values())
        engine = work.sampling.engine
        held = int(engine.has_own_weights) + (engine.copies if engine.tensor_parallel > 1 else 0)  # shared ones, and the parts of ranks
        own = (weights - adapter) * held  # without any the engine reads the trainer's own parameters
        parts.append(Part("engine weights", own, ALWAYS, "set engine.embedded.own_weights=false and copies=1"))
        assert isinstance(model, CausalModel), "only a language model samples"
        parts += engine_parts(model, work.sampling)
    return MemoryPlan((*parts, *update_parts(model, work)))


def checkpoint_bytes(model: DecoderModel, train: TrainConfig, *, spread: bool = False) -> int:
    """Bytes of one checkpoint's tensors: weights, masters, moments; of a model that is `spread` over a mesh,
    as that keeps them.
    """
    trained = trained_weights(model)
    if spread:
        trained = {name: torch.empty_like(p, dtype=learned_dtype(model), requires_grad=True) for name, p in trained.items()}
    kept = _stepped(trained, train)[0].tensors().values()
    return sum(t.nbytes for t in kept) + sum(p.nbytes for p in trained.values())


def learned_dtype(model: DecoderModel) -> torch.dtype:
    """Type of the parameters that a mesh keeps of a model that trains."""
    return torch.promote_types(model.dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class OptimizerBytes:
    """Memory of training in addition to parameters and activations."""

    masters: int
    moments: int
    gradients: int
    scratch: int
    """Scratch memory of a step."""


def optimizer_bytes(trained: Mapping[str, Tensor], train: TrainConfig) -> OptimizerBytes:
    """Bytes of the optimizer of some parameters, which are on the meta device."""
    optimizer, gradients, scratch = _stepped(trained, train)
    sizes = {"master": 0, "step": 0, "moment": 0}
    for key, tensor in optimizer.tensors().items():
        kind = key.partition("/")[0]
        sizes[kind if kind in sizes else "moment"] += tensor.nbytes
    return OptimizerBytes(sizes["master"], sizes["moment"], gradients, scratch)


def optimizer_parts(trained: Mapping[str, Tensor], work: Workload) -> list[Part]:
    """Memory of the optimizer of some parameters, which are on the meta device."""
    if work.offloaded:  # each gradient leaves as soon as it is there
        largest = max((p.nbytes for p in trained.values()), default=0)
        return [Part("gradients", largest, TRAINING, "choose a smaller model")]
    found = optimizer_bytes(trained, work.train)
    smaller = "choose a smaller model, or set train.offload=true"
    return [
        Part("float32 masters", found.masters, ALWAYS, smaller),
        Part("gradients", found.gradients, TRAINING, smaller),
        Part("optimizer moments", found.moments, ALWAYS, smaller),
        Part("optimizer scratch", found.scratch, ("step",), smaller),
    ]


def _stepped(trained: Mapping[str, Tensor], train: TrainConfig) -> tuple[Optimizer, int, int]:
    """The run's optimizer over parameters like these, after two steps; the bytes of the gradients, and of
    what a step takes.
    """
    named = {name: nn.Parameter(torch.empty_like(p)) for name, p in trained.items()}
    optimizer = Optimizer(named.items(), train.optim, total_steps=2)
    gradients = scratch = 0
    for fused in (None, optimizer.adamw):  # the first step makes moments; in the second the fused kernel, not there on meta, makes nothing
        torch.stack([p.sum() for p in named.values()]).sum().backward()
        gradients = sum(p.grad.nbytes for p in optimizer.masters if p.grad is not None)
        if fused is not None:
            optimizer.adamw = None
        with LiveBytes(lambda _: "scratch") as live:
            optimizer.step()
        scratch, optimizer.adamw = live.peak("scratch"), fused or optimizer.adamw
    return optimizer, gradients, scratch


def engine_parts(model: CausalModel, sampling: Sampling) -> list[Part]:
    """Memory of an embedded engine in addition to weights."""
    engine = sampling.engine
    assert engine.cache_tokens is not None, "the cache has its size by now"
    store = KVStore(-(-engine.cache_tokens // engine.block_size), engine.block_size)
    slots = torch.zeros(1, dtype=torch.int64, device=META)

    slab = _largest_slab(store, sampling)

    def write(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        store.write(layer, slots, k, v)
        slab.room(layer, k, v)
        return q.new_empty(*q.shape[:2], v.shape[-1])

    with LiveBytes(lambda _: None), torch.no_grad():
        model.hidden(slots, slots, write)
    phases: tuple[Phase, ...] = ALWAYS if sampling.overlaps else ("rollout",)
    cached: tuple[Phase, ...] = ("rollout",) if sampling.sleeps else ALWAYS
    logits = sampling.rows * model.vocab_size * max(bytes_per_logit(model.dtype, params) for params in sampling.params)
    return [
        Part("KV cache", store.size_bytes * engine.copies, cached, "lower engine.embedded.cache_tokens"),
        Part("decode rows", slab.size_bytes * engine.copies, phases, "lower engine.embedded.max_running", estimate=True),
        Part("sampling logits", round(logits) * engine.copies, phases, "lower engine.embedded.max_running"),
    ]


def _largest_slab(store: KVStore, sampling: Sampling) -> DecodeSlab:
    """The rows of all sequences that decode together, when they take the most: rows double on the way to the
    longest.
    """
    tokens, capacities = store.num_blocks * store.block_size, [capacity_for(1, store.block_size)]
    while capacities[-1] < sampling.longest:
        capacities.append(2 * capacities[-1])
    slabs = [DecodeSlab(capacity, min(sampling.rows, tokens // capacity)) for capacity in capacities]
    return max(slabs, key=lambda slab: slab.num_rows * slab.capacity)


def bytes_per_logit(dtype: torch.dtype, params: SamplingParams) -> float:
    """Bytes that drawing a token takes at its peak for each logit of its row, those logits themselves
    included.
    """
    rows = 4
    with LiveBytes(lambda t: "logits" if t.shape[-1:] == (DRAW_VOCAB,) else None) as live, torch.inference_mode():
        sample(torch.zeros(rows, DRAW_VOCAB, dtype=dtype), [params] * rows, [0] * rows)
    return live.peak("logits") / (rows * DRAW_VOCAB)


def update_parts(model: DecoderModel, work: Workload) -> list[Part]:
    """Memory of the passes over the largest row."""
    kept, peak = activation_bytes(model, work.lengths)
    again = "" if recomputes(model.hf) else ", or set model.gradient_checkpointing=true"
    rows = f"lower train.max_tokens_per_device{again}"
    language = _language_parts(model, work) if isinstance(model, CausalModel) else []
    return [
        *language,
        Part("activations kept", kept, ("loss",), rows, estimate=True),
        Part("activations in the backward pass", peak, ("backward",), rows, estimate=True),
    ]


def _language_parts(model: CausalModel, work: Workload) -> list[Part]:
    return [
        Part("logits", _logits_peak(model, work), ("loss",), "lower train.logprob_chunk_tokens"),
        Part("output layer gradient", _head_gradient(model, work), ("loss", "backward"), "choose a smaller model", estimate=True),
    ]


def _logits_peak(model: CausalModel, work: Workload) -> int:
    """Bytes of the tensors as wide as the vocabulary that are alive at a time while log-probs are computed
    and differentiated.
    """
    weight = model.lm_head.weight
    assert isinstance(weight, Tensor)
    chunk = rows_per_chunk(work.train, model.vocab_size)
    num = min(work.num_predicting, 3 * chunk)  # a fourth chunk holds nothing that three do not
    hidden = torch.empty(num, weight.shape[1], dtype=model.dtype, device=META, requires_grad=True)
    targets = torch.zeros(num, dtype=torch.int64, device=META)
    hooks = [weight.register_post_accumulate_grad_hook(drop_gradient)] if weight.requires_grad else []
    try:
        with LiveBytes(lambda t: "logits" if t.shape[-1:] == (model.vocab_size,) else None) as live:
            heat = torch.ones(num, device=META)
            kept = Nucleus(targets, torch.arange(num + 1)) if work.nucleus else None
            logprobs, entropy = chunked_logprobs(
                model.logits, hidden, targets, heat, chunk, entropy_grad=work.entropy_grad, nucleus=kept
            )
            (logprobs + entropy if work.entropy_grad else logprobs).sum().backward()
    finally:
        for hook in hooks:
            hook.remove()
    return live.peak("logits")


def _head_gradient(model: CausalModel, work: Workload) -> int:
    """The output layer's gradient while the chunks' are added up: the sum so far, and the next chunk's."""
    weight = model.lm_head.weight
    assert isinstance(weight, Tensor)
    if not weight.requires_grad:
        return 0
    return weight.nbytes * (1 if work.num_predicting <= rows_per_chunk(work.train, model.vocab_size) else 2)
