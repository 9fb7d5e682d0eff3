"""Layouts of a model over devices: every possible one, the memory and traffic of a rank, and the best
of those that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from whet.model.config import ModelConfig
from whet.plan.memory import PHASES, MemoryPlan, Part, Workload, plan_memory
from whet.plan.mesh_memory import MeshPlanner, Planned, check_divides
from whet.plan.text import bytes_text
from whet.plan.traffic import Flow, Passes, flows_of, seconds_of
from whet.train.torch_native.config import ParallelConfig

FULL = 0.9
"""Share of a device's memory that a plan may take: the rest is for the allocator's gaps and the libraries'
own buffers.
"""
INSIDE, BETWEEN = 450e9, 50e9
"""Bytes that a device sends in a second inside a node (NVLink 4) and between nodes (400 Gb/s for each
device).
"""


@dataclass(frozen=True, slots=True)
class DeviceSet:
    """Devices to spread a model over."""

    count: int
    memory_bytes: int
    """Memory of each device."""
    per_node: int
    """Neighbours with fast links."""

    @property
    def usable_bytes(self) -> float:
        return FULL * self.memory_bytes


class RunRequirements(Protocol):
    """Requirements of a run on a layout, in addition to its model's part in it."""

    def check(self, degrees: ParallelConfig) -> None:
        """Raises ValueError if the run cannot do with them."""
        ...

    def parts(self, degrees: ParallelConfig, work: Workload) -> Sequence[Part]:
        """Further memory of a rank: that of the other models, and of copies."""
        ...


class NoRequirements:
    """A model alone."""

    def check(self, degrees: ParallelConfig) -> None:
        pass

    def parts(self, degrees: ParallelConfig, work: Workload) -> Sequence[Part]:
        return ()


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes of an optimizer step."""

    samples: int
    """Samples per optimizer step. At most this many data-parallel ranks get work."""
    longest: int
    """Tokens of the longest sample; the others are counted as if they were as long."""
    budget: int
    """`train.max_tokens_per_device`."""
    work: Callable[[int], Workload]
    """Workload of the memory plan, by the number of ranks that share a row."""
    requirements: RunRequirements = field(default_factory=NoRequirements)
    """Memory of the run in addition to the model and its training."""


@dataclass(frozen=True)
class Layout:
    """One way to spread a model."""

    degrees: ParallelConfig
    flows: tuple[Flow, ...]
    """Traffic of a rank in an optimizer step."""
    seconds: float
    """Seconds of these exchanges, one after another."""
    planned: Callable[[], MemoryPlan]

    @cached_property
    def plan(self) -> MemoryPlan:
        """Memory of a rank; computed on first use."""
        return self.planned()

    @property
    def name(self) -> str:
        """`shard 4 x tensor 2`."""
        return name_of(self.degrees)

    @property
    def kinds(self) -> int:
        """Degrees that are more than 1."""
        degrees = self.degrees
        return sum(x > 1 for x in (degrees.replicate, degrees.shard, degrees.context, degrees.tensor, degrees.expert))


def name_of(degrees: ParallelConfig) -> str:
    """`shard 4 x tensor 2`; `one device`."""
    names = ("replicate", "shard", "context", "tensor")
    text = " x ".join(f"{name} {size}" for name in names if (size := int(getattr(degrees, name))) > 1)
    return (text or "one device") + (f", expert {degrees.expert}" if degrees.expert > 1 else "")


def degrees_for(model: Planned, devices: DeviceSet, samples: int) -> Iterator[ParallelConfig]:
    """The degrees that a model can be spread by, so that every device has work.

    Tensor and context stay inside a node: they exchange something in every layer, and wait for it.
    """
    text = model.config.get_text_config()
    known = text.to_dict()
    experts = next((known[key] for key in ("num_experts", "n_routed_experts", "num_local_experts") if known.get(key)), 0)
    for tensor in _divisors(devices.count):
        divides = text.num_attention_heads % tensor == 0 and text.num_key_value_heads % tensor == 0
        if tensor > devices.per_node or (tensor > 1 and not divides):
            continue
        for context in _divisors(devices.count // tensor):
            if context * tensor > devices.per_node:
                continue
            data = devices.count // tensor // context
            if data > samples:
                continue
            for shard in _divisors(data):
                block = shard * context * tensor
                spread = [e for e in _divisors(block) if e > 1 and e % tensor == 0 and experts and experts % e == 0]
                for expert in (1, *spread):
                    yield ParallelConfig(replicate=data // shard, shard=shard, context=context, tensor=tensor, expert=expert)


def layout_of(planner: MeshPlanner, degrees: ParallelConfig, step: StepSizes, devices: DeviceSet) -> Layout:
    """The layout with the memory and traffic of a rank.

    Raises:
        ValueError: if the model, or one of the run's other models, cannot be spread this way.
    """
    step.requirements.check(degrees)
    model, work = planner.model, step.work(degrees.context)
    check_divides(model, degrees.tensor)
    row = max(step.budget * degrees.context, step.longest)
    together = row // step.longest
    rows = math.ceil(math.ceil(step.samples / degrees.num_data) / together)
    own = min(together, step.samples) * step.longest // degrees.context
    passes = Passes(rows, own, recompute=bool(planner.config.gradient_checkpointing))
    flows = flows_of(model, planner.groups(degrees), degrees, passes)

    def plan() -> MemoryPlan:
        alone = plan_memory(model, work) if degrees.num_ranks == 1 else planner.plan(work, degrees)
        return MemoryPlan((*alone.parts, *step.requirements.parts(degrees, work)))

    return Layout(degrees, tuple(flows), seconds_of(flows, devices.per_node, INSIDE, BETWEEN), plan)


def layouts(model: Planned, config: ModelConfig, step: StepSizes, devices: DeviceSet) -> list[Layout]:
    """Every way to spread a model over the devices that its plan and the run allow; those that exchange for
    the least time first, of equals the plainer one.
    """
    planner = MeshPlanner(model, config)
    found: list[Layout] = []
    for degrees in degrees_for(model, devices, step.samples):
        try:
            found.append(layout_of(planner, degrees, step, devices))
        except ValueError:  # a model's own plan cannot do it, or the run
            continue
    return sorted(found, key=lambda layout: (layout.seconds, layout.kinds, -layout.degrees.shard))


def choose(found: Sequence[Layout], devices: DeviceSet) -> Layout:
    """The first that fits.

    Raises:
        ValueError: none does; the text has the smallest one's largest parts, and what makes them smaller.
    """
    for layout in found:
        if layout.plan.peak_bytes <= devices.usable_bytes:
            return layout
    if not found:
        raise ValueError(f"train.parallel: {devices.count} devices cannot share this model; give each a sample of the step, or use fewer")
    least = min(found, key=lambda layout: layout.plan.peak_bytes)
    parts = "; ".join(f"{part.name} {bytes_text(part.size_bytes)} ({part.advice})" for part in least.plan.largest(3))
    raise ValueError(
        f"train.parallel: nothing fits {devices.count} devices of {bytes_text(devices.memory_bytes)}: the leanest layout, {least.name}, "
        f"holds {bytes_text(least.plan.peak_bytes)} on a rank at its peak. Its largest parts: {parts}. More devices, or the Megatron "
        "backend's pipeline stages once it is there, hold more"
    )


def reasons(layout: Layout, devices: DeviceSet) -> list[str]:
    """Why a layout: the arithmetic, a line for each part."""
    plan, all_of_it = layout.plan, bytes_text(devices.memory_bytes)
    held = [f"{part.name} {bytes_text(part.size_bytes)}" for part in _held(plan)]
    sent = [
        f"{flow.what} {bytes_text(flow.sent_bytes)}{'' if flow.span <= devices.per_node else ' over the network'}" for flow in layout.flows
    ]
    return [
        f"memory: {bytes_text(plan.peak_bytes)} of {all_of_it} at the peak ({PHASES[plan.peak]}) = {' + '.join(held)}",
        f"exchanges: {layout.seconds:.2g} s a step, nothing hidden = {' + '.join(sent) or 'none'} by each rank",
    ]


def _held(plan: MemoryPlan) -> list[Part]:
    return [part for part in plan.parts if plan.peak in part.during and part.size_bytes]


def _divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]
