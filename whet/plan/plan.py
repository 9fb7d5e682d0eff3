"""`whet plan`: how a model would be spread over devices, before there is data, a reward or a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whet.build.process import quiet_transformers
from whet.data.hub import resolve_model_path
from whet.engine.embedded.config import EmbeddedConfig
from whet.model.causal import CausalModel
from whet.model.config import LoraConfig, ModelConfig
from whet.model.lora import add_adapter
from whet.model.meta import read_meta
from whet.plan.layouts import FULL, DeviceSet, Layout, StepSizes, choose, layout_of, layouts, name_of, reasons
from whet.plan.memory import Sampling, Workload, engine_parts, largest_row
from whet.plan.mesh_memory import MeshPlanner
from whet.plan.options import PlanOptions
from whet.plan.text import bytes_text
from whet.train.torch_native.config import ParallelConfig, TrainConfig
from whet.types import SamplingParams

SHOWN = 6
"""Layouts that are listed."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Result of `whet plan`."""

    model: str
    """Its name and sizes, in words."""
    devices: DeviceSet
    best: Layout | None
    """Best layout; None: nothing fits."""
    fault: str
    """Reason why nothing fits."""
    listed: Sequence[Layout]
    engine_bytes: int
    """Bytes of an engine's weights, whole."""
    token_bytes: int
    """Bytes of a token in the engine's cache."""

    def lines(self) -> Iterator[str]:
        """The report."""
        yield f"{self.model}; {self.devices.count} x {bytes_text(self.devices.memory_bytes)}, {self.devices.per_node} to a node"
        yield f"{'layout':<52}  {'peak of a rank':>14}  {'sent a step':>12}  {'seconds':>8}"
        for layout in self.listed:
            sent = sum(flow.sent_bytes for flow in layout.flows)
            fits = "" if layout.plan.peak_bytes <= self.devices.usable_bytes else "  does not fit"
            peak = bytes_text(layout.plan.peak_bytes)
            yield f"{layout.name:<52}  {peak:>14}  {bytes_text(sent):>12}  {layout.seconds:>8.2f}{fits}"
        if self.best is None:
            yield self.fault
        else:
            yield f"chosen: {self.best.name}, for it fits {FULL:.0%} of a device and exchanges for the least time"
            yield from (f"  {line}" for line in reasons(self.best, self.devices))
        room = FULL * self.devices.memory_bytes - self.engine_bytes
        tokens = f"{int(room / self.token_bytes):,} tokens" if room > 0 else "nothing"
        yield (
            f"an engine on a device of its own: weights {bytes_text(self.engine_bytes)}, then room for {tokens} of cache "
            f"({bytes_text(self.token_bytes)} each)"
        )

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        best = None if self.best is None else self.best.degrees.model_dump()
        listed = [_facts(layout) for layout in self.listed]
        sizes = {"engine_bytes": self.engine_bytes, "token_bytes": self.token_bytes}
        return {"model": self.model, "chosen": best, "layouts": listed, **sizes}


def _facts(layout: Layout) -> dict[str, object]:
    return {
        "name": layout.name,
        "peak_bytes": layout.plan.peak_bytes,
        "memory_bytes": {part.name: part.size_bytes for part in layout.plan.parts if part.size_bytes},
        "sent_bytes": {flow.what: round(flow.sent_bytes) for flow in layout.flows},
        "seconds": layout.seconds,
    }


def plan(options: PlanOptions) -> PlanResult:
    """Spread a model over devices.

    Raises:
        ValueError: if there is no such model, or the degrees do not fit it or the devices.
    """
    quiet_transformers()
    config = ModelConfig.model_validate(
        {"path": options.model, "dtype": options.dtype, "gradient_checkpointing": options.recompute, "device": "cpu"}
    )
    model = read_meta(resolve_model_path(options.model), config)
    if options.lora_rank is not None:
        add_adapter(model, LoraConfig(rank=options.lora_rank))
    return plan_model(model, config, options)


def plan_model(model: CausalModel, config: ModelConfig, options: PlanOptions) -> PlanResult:
    """Spread a model without contents over devices.

    Raises:
        ValueError: if the degrees do not fit the model or the devices.
    """
    devices = DeviceSet(options.devices, round(options.memory_gib * GIB), min(options.per_node, options.devices))
    step = _step(options)
    degrees = parse_degrees(options.degrees)
    if degrees is not None:
        if degrees.num_ranks != options.devices:
            raise ValueError(f"{name_of(degrees)} is {degrees.num_ranks} ranks, but there are {options.devices} devices")
        found = [layout_of(MeshPlanner(model, config), degrees, step, devices)]
    else:
        found = layouts(model, config, step, devices)
    best, fault = None, ""
    try:
        best = choose(found, devices)
    except ValueError as error:
        fault = str(error)
    listed = found[:SHOWN] if best is None or best in found[:SHOWN] else [best, *found[: SHOWN - 1]]
    weights = sum(p.numel() for _, p in model.named_weights())
    text = f"{type(model.hf).__name__}, {weights / 1e9:.2f}B parameters, {options.dtype}"
    return PlanResult(text, devices, best, fault, listed, weights * model.dtype.itemsize, _token_bytes(model))


def _step(options: PlanOptions) -> StepSizes:
    lora = LoraConfig(rank=options.lora_rank) if options.lora_rank is not None else None
    train = TrainConfig(max_tokens_per_device=options.budget, lora=lora)

    def work(context: int) -> Workload:
        row = largest_row((options.longest,), options.budget * context, options.samples)
        return Workload(train, row, reference=options.reference, offloaded=options.offload)

    return StepSizes(options.samples, options.longest, options.budget, work)


def _token_bytes(model: CausalModel) -> int:
    """Bytes that a token takes in an engine's cache."""
    block = 16
    sampling = Sampling(EmbeddedConfig(cache_tokens=block, block_size=block), (SamplingParams(1),), 1, 1)
    return next(part.size_bytes for part in engine_parts(model, sampling) if part.name == "KV cache") // block


def parse_degrees(text: str | None) -> ParallelConfig | None:
    """`shard=8,tensor=2` as degrees.

    Raises:
        ValueError: if it is none.
    """
    if text is None:
        return None
    try:
        return ParallelConfig.model_validate(dict(pair.split("=", 1) for pair in text.split(",")))
    except ValueError as error:
        names = ", ".join(ParallelConfig.model_fields)
        raise ValueError(f"--degrees={text} cannot be used: write for example shard=8,tensor=2, of {names}: {error}") from error
