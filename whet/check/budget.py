"""Memory of the run, compared with the memory of the device."""

from __future__ import annotations

import os
from collections.abc import Iterator

from whet.build.parts import sized
from whet.check.context import TRAINING, CheckContext
from whet.check.findings import Note, fail, need, ok, skip, warn
from whet.check.models import auxiliary_parts, has_own_reference
from whet.check.saved import checkpoint_sizes, copy_part
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.engine.servers.pool import sites_here
from whet.model.causal import CausalModel, pick_device
from whet.plan.layouts import name_of
from whet.plan.live import LiveBytes
from whet.plan.memory import (
    ALWAYS,
    PHASES,
    MemoryPlan,
    Part,
    Sampling,
    Workload,
    largest_row,
    plan_memory,
)
from whet.plan.mesh_memory import MeshPlanner, check_spread
from whet.plan.text import bytes_text
from whet.rollout.runner import greedily
from whet.rollout.sampling import check_fits
from whet.runfolder.machine import device_memory
from whet.settings.rl import RunConfig

NEAR_FULL = 0.9


def check_limits(context: CheckContext) -> Iterator[Note]:
    """Compare the length of trajectories with the room of the engine."""
    config, model = context.rl, need(context.model, "the model's config.json")
    if config.engine.num_servers:
        yield skip(f"the servers of engine.name={config.engine.name} tell their longest sequence when the run starts")
        yield from server_gpus(config)
        return
    assert isinstance(model, CausalModel), "only a language model samples"
    core = EngineCore(model, engine_sizes(config, model))
    rollouts = {TRAINING: config.rollout, **{name: chosen.rollout.over(config.rollout) for name, chosen in config.evaluate.sets.items()}}
    for name, rollout in rollouts.items():
        prefix, rollout = f"{name}: " if name else "", rollout.within(core.max_tokens)
        try:
            check_fits(rollout, core.max_tokens)
        except ValueError as error:
            yield fail(f"{prefix}{error}")
        else:
            text = f"trajectories of up to {rollout.max_tokens} tokens in {rollout.max_turns} turns; the engine runs {core.max_tokens}"
            yield ok(prefix + text)


def server_gpus(config: RunConfig) -> Iterator[Note]:
    """Check that there are GPUs for the servers that the run starts on this machine.

    Raises:
        ValueError: if they are too few.
    """
    if not config.engine.num_started or config.cluster.backend == "ray" or config.train.parallel == "auto":
        return
    num_ranks = 1 if config.train.degrees is None else config.train.degrees.num_ranks
    sites = sites_here(config.engine, pick_device(config.model.device), {**os.environ, "WORLD_SIZE": str(num_ranks)})
    if sites.share_gpus:
        yield warn("servers share GPUs with the trainer: leave memory for it in their arguments, or set engine.sleep=true")


def check_memory(context: CheckContext) -> Iterator[Note]:
    """Compare the memory plan with the device's memory."""
    model = need(context.model, "the model's config.json")
    try:
        device = pick_device(context.config.model.device)
    except ValueError:
        yield skip("not planned: needs the device")
        return
    train = context.config.train
    if train.parallel == "auto":
        yield skip("not planned: train.parallel=auto is settled when the job starts; `whet plan MODEL --devices N` shows the layouts")
        return
    degrees = train.degrees
    work = workload(context, 1 if degrees is None else degrees.context)
    if degrees is None:
        plan = plan_memory(model, work)
    else:
        check_spread("the policy", model, degrees, train)
        plan = MeshPlanner(model, context.config.model).plan(work, degrees)
        yield ok(f"train.parallel: {name_of(degrees)}, planned for the first of {degrees.num_ranks} processes, which holds the most")
    if context.auxiliary is not None:
        for name, auxiliary, own, key in context.auxiliary.over_ranks(context.rl):
            check_spread(name, auxiliary, own, train, key)
        plan = MemoryPlan((*plan.parts, *auxiliary_parts(context.auxiliary, context.rl, work)))
    copied: list[Part] = []
    if context.config.checkpoint.async_save:
        copied.append(copy_part(checkpoint_sizes(context, model, spread=train.spreads), context.config))
    if device.type == "cpu":
        plan = MemoryPlan((*plan.parts, *copied))
    elif copied:
        held = bytes_text(copied[0].size_bytes)
        yield ok(f"checkpoint.async_save: a process keeps {held} in its machine's memory while a checkpoint is written")
    context.memory = plan
    capacity, source = device_memory(device)
    yield judge(plan, capacity, source)


def judge(plan: MemoryPlan, capacity: int, source: str) -> Note:
    """Compare a plan with a capacity in bytes."""
    parts = [f"{bytes_text(part.size_bytes):>10}  {_described(part)}" for part in plan.parts if part.size_bytes]
    share = plan.peak_bytes / capacity
    most = f"{bytes_text(plan.peak_bytes)} at its peak ({PHASES[plan.peak]}), {share:.0%} of {bytes_text(capacity)} ({source})"
    if share <= NEAR_FULL:
        return ok(most, parts)
    large = "; ".join(f"{part.name} {bytes_text(part.size_bytes)} ({part.advice})" for part in plan.largest(3))
    note = fail if share > 1 else warn
    return note(f"{most}; the largest parts: {large}", parts)


def _described(part: Part) -> str:
    """`name (when)`, marked if its size is an estimate."""
    when = "always" if part.during == ALWAYS else ", ".join(PHASES[phase] for phase in part.during)
    return f"{part.name} ({when}){', estimate' if part.estimate else ''}"


def workload(context: CheckContext, row_ranks: int = 1) -> Workload:
    """Workload of the memory plan; `row_ranks` devices share each row."""
    config = context.config
    budget = config.train.max_tokens_per_device * row_ranks
    offloaded = config.train.offload and pick_device(config.model.device).type != "cpu"
    if context.program.unit == "step":
        longest, count = units(context, budget)
        row, reference = largest_row(longest, budget, count), context.program.has_reference
        return Workload(config.train, row, reference=reference, reference_advice="choose a smaller model", offloaded=offloaded)
    config = context.rl
    plan, algorithm = need(context.batch, "the batch sizes"), need(context.algorithm, "the algorithm")
    rollouts = [context.fitted(each) for each in (config.rollout, *(s.rollout.over(config.rollout) for s in config.evaluate.sets.values()))]
    ways = [rollout.sampling(()) for rollout in rollouts]
    if context.plays_greedily:
        ways.append(greedily(ways[0]))
    model = need(context.model, "the model's config.json")
    assert isinstance(model, CausalModel), "only a language model samples"
    sizes = config.engine_sizes if config.engine.num_servers else engine_sizes(config, model)
    together = plan.prompts_per_rollout * context.played_per_prompt
    for name, chosen in config.evaluate.sets.items():
        together = max(together, len(context.rows[name]) * chosen.samples_per_prompt if name in context.rows else sizes.max_running)
    return Workload(
        config.train,
        largest_row((rollouts[0].max_tokens,), budget, plan.samples_per_step),
        offloaded=offloaded,
        entropy_grad=algorithm.entropy_grad,
        nucleus=config.rollout.sampling(()).narrows,
        reference="ref_logprobs" in algorithm.needs and not has_own_reference(config),
        reference_advice=reference_advice(config.algo.name),
        sampling=None if config.engine.num_servers else Sampling(
            sizes,
            tuple(ways),
            min(sizes.max_running, sizes.max_batch_tokens, together),
            max(rollout.max_tokens for rollout in rollouts),
            together,
            config.control.overlaps,
            config.engine_sleeps,
        ),
    )


def engine_sizes(config: RunConfig, model: CausalModel) -> EmbeddedConfig:
    """The embedded engine's sizes; `model` is on the meta device."""
    with LiveBytes(lambda _: None):
        return sized(config, model)


def reference_advice(algorithm: str) -> str:
    """Advice on how an algorithm does without a reference."""
    if ":" in algorithm:
        return f"have {algorithm} need no reference"
    return "set algo.kl_coef=0 and algo.kl_reward.coef=0, without algo.reference"


def units(context: CheckContext, budget: int) -> tuple[tuple[int, ...], int]:
    """Lengths of the largest unit's samples, and units per step, of a run without rollouts. Lengths that are
    not known yet are the longest allowed.
    """
    rows = context.program.rows
    assert rows is not None, "a run with rollouts is measured by its batch sizes"
    longest = (context.steps.data.max_tokens or budget // rows.samples_per_row,) * rows.samples_per_row
    return context.longest or longest, rows.per_step(context.config)
