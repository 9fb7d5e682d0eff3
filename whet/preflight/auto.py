"""`train.parallel = "auto"`: the degrees of a job, from the model, the devices and their memory."""

from __future__ import annotations

from dataclasses import dataclass

from whet.algo import StepPlan, build_algorithm
from whet.data.hub import resolve_model_path
from whet.model.causal import pick_device
from whet.model.lora import add_adapter
from whet.model.meta import read_meta, read_meta_scalar
from whet.preflight.budget import device_memory, units, workload
from whet.preflight.layouts import Devices, Step, choose, layouts, reasons
from whet.preflight.scene import Scene
from whet.settings import BaseRunConfig, RunConfig
from whet.supervised_settings import RewardModelRunConfig
from whet.train.batching import plan_batch
from whet.train.torch_native.mesh import ParallelConfig


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
        ValueError: if nothing fits; the text says what to change.
    """
    read = read_meta_scalar if isinstance(config, RewardModelRunConfig) else read_meta
    model = read(resolve_model_path(config.model.path), config.model)
    if config.train.lora is not None:
        add_adapter(model, config.train.lora)
    scene, budget = Scene(config, model=model), config.train.max_tokens_per_device
    if isinstance(config, RunConfig):
        plan, longest = plan_batch(config.batch), config.rollout.max_tokens
        algorithm = build_algorithm(config.algo, StepPlan(plan.optimizer_steps, plan.samples_per_prompt, longest))
        scene.batch, scene.algorithm, samples = plan, algorithm, plan.samples_per_step
    else:
        lengths, samples = units(scene, budget)
        longest = sum(lengths)
    device = pick_device(config.model.device)
    memory, _ = device_memory(device)
    devices = Devices(count, memory // per_node if device.type == "cpu" else memory, per_node)
    step = Step(samples, longest, budget, lambda row_ranks: workload(scene, row_ranks))
    found = layouts(model, config.model, step, devices)
    best = choose(found, devices)
    first = f"train.parallel: auto chose {best.name} of {len(found)} layouts for {count} devices"
    return Chosen(best.degrees, (first, *(f"train.parallel: {line}" for line in reasons(best, devices))))
