"""`train.parallel = "auto"`: the degrees of a job, from the model, the devices and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from whet.build.learners import algorithm_of, check_layouts
from whet.build.programs import program_of
from whet.check.budget import device_memory, units, workload
from whet.check.context import Scene
from whet.check.models import models_beside, parts_beside
from whet.check.saved import checkpoint_sizes, copy_part
from whet.data.hub import resolve_model_path
from whet.model.causal import pick_device
from whet.model.lora import add_adapter
from whet.plan.layouts import Devices, Step, choose, layouts, reasons
from whet.plan.memory import Part, Workload
from whet.plan.mesh_memory import Planned, check_spread
from whet.settings.rl import BaseRunConfig, RunConfig
from whet.train.batching import plan_batch
from whet.train.torch_native.config import ParallelConfig

Settings = TypeVar("Settings", bound=BaseRunConfig)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The degrees, and why."""

    degrees: ParallelConfig
    notes: tuple[str, ...]


def auto_degrees(config: BaseRunConfig, count: int, per_node: int) -> Chosen:
    """Of the layouts that fit, the one whose exchanges take the least time.

    Args:
        config: the run's settings.
        count: processes of the job, each with a device.
        per_node: of them on a machine; on the CPU they share its memory.

    Raises:
        ValueError: if nothing fits, or a model beside the policy asks for other processes or cannot be spread as it asks; the text says
            what to change.
    """
    folder = resolve_model_path(config.model.path)
    model = program_of(config).model.read_meta(folder, config.model)
    if config.train.lora is not None:
        add_adapter(model, config.train.lora)
    scene, budget = Scene(config, model=model), config.train.max_tokens_per_device
    if scene.program.unit == "rollout":
        rl, plan, algorithm = scene.rl, plan_batch(scene.rl.batch), algorithm_of(scene.rl)
        check_layouts(with_degrees(rl, ParallelConfig(replicate=count)))
        scene.batch, scene.algorithm, samples, longest = plan, algorithm, plan.samples_per_step, rl.rollout.max_tokens
        scene.beside = models_beside(rl, algorithm, folder)
    else:
        lengths, samples = units(scene, budget)
        longest = sum(lengths)
    device = pick_device(config.model.device)
    memory, _ = device_memory(device)
    devices = Devices(count, memory // per_node if device.type == "cpu" else memory, per_node)
    whole = _WholeRun(scene, model, count)
    whole.check_own()
    step = Step(samples, longest, budget, lambda row_ranks: workload(scene, row_ranks), whole)
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
    """The same settings, with these degrees."""
    return config.model_copy(update={"train": config.train.model_copy(update={"parallel": degrees})})


class _WholeRun:
    """What a run asks of a layout: that each of its models can be spread and computed so, and room for all (`layouts.Beside`)."""

    def __init__(self, scene: Scene, policy: Planned, count: int) -> None:
        self._scene, self._policy, self._count = scene, policy, count

    def check(self, degrees: ParallelConfig) -> None:
        check_spread("the policy", self._policy, degrees, self._scene.config.train)
        if self._scene.beside is not None:
            self._check_beside(with_degrees(self._scene.rl, degrees))

    def check_own(self) -> None:
        """Refuse degrees of a model's own that it cannot be spread by: no layout of the policy would help."""
        if self._scene.beside is not None:
            self._check_beside(with_degrees(self._scene.rl, None))

    def parts(self, degrees: ParallelConfig, work: Workload) -> Sequence[Part]:
        scene, parts = self._scene, list[Part]()
        if scene.beside is not None:
            parts += parts_beside(scene.beside, with_degrees(scene.rl, degrees), work)
        if self._copied is not None:
            parts.append(copy_part(self._copied, with_degrees(scene.config, degrees)))
        return parts

    @cached_property
    def _copied(self) -> dict[str, int] | None:
        """What a checkpoint holds, if the devices' memory is where a copy of it is kept while it is written."""
        config = self._scene.config
        here = config.checkpoint.async_save and pick_device(config.model.device).type == "cpu"
        return checkpoint_sizes(self._scene, self._policy, spread=self._count > 1) if here else None

    def _check_beside(self, config: RunConfig) -> None:
        assert self._scene.beside is not None
        for name, model, degrees, key in self._scene.beside.over_ranks(config):
            check_spread(name, model, degrees, config.train, key)
