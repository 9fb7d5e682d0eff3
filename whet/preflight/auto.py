"""`train.parallel = "auto"`: the degrees of a job, from the model, the devices and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from whet.algo import StepPlan, build_algorithm
from whet.build_learners import check_layouts
from whet.data.hub import resolve_model_path
from whet.model.causal import CausalModel, pick_device
from whet.model.lora import add_adapter
from whet.model.meta import read_meta, read_meta_scalar
from whet.model.parallel_plan import cuts_of
from whet.preflight.beside import checkpoint_total, models_beside, parts_beside
from whet.preflight.budget import copy_of, device_memory, units, workload
from whet.preflight.layouts import Devices, Step, choose, layouts, reasons
from whet.preflight.memory import Part, Workload
from whet.preflight.mesh_memory import Planned, check_divides
from whet.preflight.scene import Scene
from whet.settings import BaseRunConfig, RunConfig
from whet.supervised_settings import RewardModelRunConfig
from whet.train.batching import plan_batch
from whet.train.torch_native.config import check_compiled
from whet.train.torch_native.mesh import ParallelConfig
from whet.train.torch_native.mesh_ranks import attention_of

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
    read = read_meta_scalar if isinstance(config, RewardModelRunConfig) else read_meta
    folder = resolve_model_path(config.model.path)
    model = read(folder, config.model)
    if config.train.lora is not None:
        add_adapter(model, config.train.lora)
    scene, budget = Scene(config, model=model), config.train.max_tokens_per_device
    if isinstance(config, RunConfig):
        plan, longest = plan_batch(config.batch), config.rollout.max_tokens
        algorithm = build_algorithm(config.algo, StepPlan(plan.optimizer_steps, plan.samples_per_prompt, longest))
        check_layouts(with_degrees(config, ParallelConfig(replicate=count)))
        scene.batch, scene.algorithm, samples = plan, algorithm, plan.samples_per_step
        scene.beside = models_beside(config, algorithm, folder)
    else:
        lengths, samples = units(scene, budget)
        longest = sum(lengths)
    device = pick_device(config.model.device)
    memory, _ = device_memory(device)
    devices = Devices(count, memory // per_node if device.type == "cpu" else memory, per_node)
    whole = _WholeRun(scene, model)
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

    def __init__(self, scene: Scene, policy: Planned) -> None:
        self._scene, self._policy = scene, policy

    def check(self, degrees: ParallelConfig) -> None:
        self._check("the policy", self._policy, degrees, "train.parallel")
        if (beside := self._scene.beside) is not None:
            for each in beside.over_ranks(with_degrees(self._scene.rl, degrees)):
                self._check(*each)

    def check_own(self) -> None:
        """Refuse degrees of a model's own that it cannot be spread by: no layout of the policy would help."""
        if (beside := self._scene.beside) is not None:
            for each in beside.over_ranks(with_degrees(self._scene.rl, None)):
                self._check(*each)

    def parts(self, degrees: ParallelConfig, work: Workload) -> Sequence[Part]:
        beside = self._scene.beside
        parts = [] if beside is None else parts_beside(beside, with_degrees(self._scene.rl, degrees), work)
        return parts if self._checkpoint is None else [*parts, copy_of(self._checkpoint, degrees)]

    @cached_property
    def _checkpoint(self) -> int | None:
        """Bytes of one, if the devices' memory is where a copy of it is kept while it is written."""
        config = self._scene.config
        here = config.checkpoint.async_save and pick_device(config.model.device).type == "cpu"
        return checkpoint_total(self._scene, self._policy) if here else None

    def _check(self, name: str, model: Planned, degrees: ParallelConfig, key: str) -> None:
        """Raises ValueError if the model cannot be spread so, or not with the run's other settings."""
        train = self._scene.config.train
        try:
            if train.compile:
                check_compiled(degrees, key)
            check_divides(model, degrees.tensor, key)
            cuts_of(model.hf, degrees.tensor, degrees.expert, split_head=isinstance(model, CausalModel), key=key)
            gathers = attention_of(model, degrees, key) == "gather"
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if train.rows == "forest" and degrees.context > 1 and gathers:
            raise ValueError(f"{name}: train.rows is forest, but context ranks that gather keys and values attend in chains; use chains")
