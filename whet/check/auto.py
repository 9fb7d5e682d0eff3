"""`train.parallel = "auto"`: the degrees of a job, from the model, the devices and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from whet.build.learners import algorithm_of, check_layouts
from whet.build.programs import program_of
from whet.check.budget import device_memory, units, workload
from whet.check.context import CheckContext
from whet.check.models import auxiliary_models, auxiliary_parts
from whet.check.saved import checkpoint_sizes, copy_part
from whet.data.hub import resolve_model_path
from whet.model.causal import pick_device
from whet.model.freezing import freeze
from whet.model.lora import add_adapter
from whet.plan.layouts import DeviceSet, StepSizes, choose, layouts, reasons
from whet.plan.memory import Part, Workload
from whet.plan.mesh_memory import Planned, check_spread
from whet.settings.rl import BaseRunConfig, RunConfig
from whet.train.batching import plan_batch
from whet.train.torch_native.config import ParallelConfig

Settings = TypeVar("Settings", bound=BaseRunConfig)


@dataclass(frozen=True, slots=True)
class Chosen:
    """Chosen degrees, with the reasons."""

    degrees: ParallelConfig
    notes: tuple[str, ...]


def auto_degrees(config: BaseRunConfig, count: int, per_node: int) -> Chosen:
    """The fitting layout whose exchanges take the least time.

    Args:
        config: the run's settings.
        count: number of processes of the job, each with a device.
        per_node: processes on one machine; on the CPU they share its memory.

    Raises:
        ValueError: nothing fits, or an auxiliary model asks for another number of processes or cannot be
            spread by its own degrees; the text names the change.
    """
    folder = resolve_model_path(config.model.path)
    model = program_of(config).model.read_meta(folder, config.model)
    if config.train.lora is not None:
        add_adapter(model, config.train.lora)
    if config.train.freeze:
        freeze(model.hf, config.train.freeze)
    context, budget = CheckContext(config, model=model), config.train.max_tokens_per_device
    if context.program.unit == "rollout":
        rl, plan, algorithm = context.rl, plan_batch(context.rl.batch), algorithm_of(context.rl)
        check_layouts(with_degrees(rl, ParallelConfig(replicate=count)))
        context.batch, context.algorithm, samples, longest = plan, algorithm, plan.samples_per_step, context.fitted(rl.rollout).max_tokens
        context.auxiliary = auxiliary_models(rl, algorithm, folder)
    else:
        lengths, samples = units(context, budget)
        longest = sum(lengths)
    device = pick_device(config.model.device)
    memory, _ = device_memory(device)
    devices = DeviceSet(count, memory // per_node if device.type == "cpu" else memory, per_node)
    whole = _WholeRun(context, model, count)
    whole.check_own()
    step = StepSizes(samples, longest, budget, lambda row_ranks: workload(context, row_ranks), whole)
    found = layouts(model, config.model, step, devices)
    try:
        best = choose(found, devices)
    except ValueError as error:
        if not config.train.compile:
            raise
        raise ValueError(f"{error}. Without train.compile, layouts with tensor and expert are looked at, too") from None
    first = f"train.parallel: auto chose {best.name} of {len(found)} layouts for {count} devices"
    return Chosen(best.degrees, (first, *(f"train.parallel: {line}" for line in reasons(best, devices))))


def with_degrees(config: Settings, degrees: ParallelConfig | None) -> Settings:
    """Copy of the settings with other degrees."""
    return config.model_copy(update={"train": config.train.model_copy(update={"parallel": degrees})})


class _WholeRun:
    """Checks and memory of a run's models on a layout (`layouts.RunRequirements`)."""

    def __init__(self, context: CheckContext, policy: Planned, count: int) -> None:
        self._context, self._policy, self._count = context, policy, count

    def check(self, degrees: ParallelConfig) -> None:
        check_spread("the policy", self._policy, degrees, self._context.config.train)
        if self._context.auxiliary is not None:
            self._check_auxiliary(with_degrees(self._context.rl, degrees))

    def check_own(self) -> None:
        """Refuse a model's own degrees that cannot spread it: no layout of the policy would help."""
        if self._context.auxiliary is not None:
            self._check_auxiliary(with_degrees(self._context.rl, None))

    def parts(self, degrees: ParallelConfig, work: Workload) -> Sequence[Part]:
        context, parts = self._context, list[Part]()
        if context.auxiliary is not None:
            parts += auxiliary_parts(context.auxiliary, with_degrees(context.rl, degrees), work)
        if self._copied is not None:
            parts.append(copy_part(self._copied, with_degrees(context.config, degrees)))
        return parts

    @cached_property
    def _copied(self) -> dict[str, int] | None:
        """Bytes of a checkpoint by model; None unless a copy of it takes the devices' memory while it is
        written.
        """
        config = self._context.config
        here = config.checkpoint.async_save and pick_device(config.model.device).type == "cpu"
        return checkpoint_sizes(self._context, self._policy, spread=self._count > 1) if here else None

    def _check_auxiliary(self, config: RunConfig) -> None:
        assert self._context.auxiliary is not None
        for name, model, degrees, key in self._context.auxiliary.over_ranks(config):
            check_spread(name, model, degrees, config.train, key)
