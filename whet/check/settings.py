"""Checks of the settings alone, and of the number of rows: batches, algorithm, length, packages."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from math import ceil

from whet.algo.base import Need
from whet.build.learners import algorithm_of, check_models, check_warmup, uncorrected
from whet.build.parts import length_of_run
from whet.build.rollouts import PLACES, find_hook
from whet.check.boundary import run_user_code
from whet.check.context import CheckContext
from whet.check.findings import Note, fail, need, ok, warn
from whet.config import ConfigError, resolve
from whet.observe.services import install
from whet.observe.trackers import SERVICES
from whet.plan.text import several
from whet.rollout.filters import build_selection
from whet.rollout.sampling import check_trainable
from whet.runfolder.machine import usable_cores
from whet.train.batching import BatchPlan, plan_batch

IMPORT_DEADLINE_S = 60.0
"""Deadline for importing a module of the user's, and for making the object that it names."""


def check_batch(context: CheckContext) -> Iterator[Note]:
    """Check the batch equation."""
    rows = context.program.rows
    if rows is not None:
        yield ok(f"{rows.per_step(context.config)} {rows.name} a step")
        return
    plan = context.batch = plan_batch(context.rl.batch)
    yield ok(equation(plan))


def equation(plan: BatchPlan) -> str:
    """A solved batch plan in words."""
    left = f"{several(plan.prompts_per_rollout, 'prompt')} x {several(plan.samples_per_prompt, 'sample')}"
    right = f"{several(plan.samples_per_step, 'sample')} x {several(plan.steps_per_rollout, 'step')}"
    return f"{left} = {right}, {several(plan.epochs, 'epoch')}: {several(plan.optimizer_steps, 'optimizer step')} a rollout"


def check_algorithm(context: CheckContext) -> Iterator[Note]:
    """Check that the algorithm can be made, and can learn from the samples."""
    config = context.rl
    try:
        check_trainable(config.rollout)
    except ValueError as error:
        yield fail(str(error))
    plan, name = need(context.batch, "the batch sizes"), config.algo.name
    algorithm = run_user_code(f"algorithm {name!r}", lambda: algorithm_of(config), IMPORT_DEADLINE_S)
    check_models(config, algorithm)
    context.algorithm = algorithm
    needs = ", ".join(sorted(algorithm.needs)) or "nothing annotated"
    yield ok(f"{name}, needs {needs}")
    if Need.BASELINE in algorithm.needs:
        prompts, total = several(plan.prompts_per_rollout, "prompt"), plan.prompts_per_rollout * context.played_per_prompt
        played = f"{prompts} x ({several(plan.samples_per_prompt, 'sample')} + 1 greedy) = {total} trajectories a rollout"
        yield ok(f"{played}; the greedy ones are compared with, not trained on")


def check_control(context: CheckContext) -> Iterator[Note]:
    """Report filters, groups in flight and the largest age of trained tokens."""
    control, plan = context.rl.control, need(context.batch, "the batch sizes")
    run_user_code("control", lambda: build_selection(control), IMPORT_DEADLINE_S)
    facts = [f"tokens train up to {several(control.max_staleness, 'version')} old"] if control.max_staleness else ["every token is fresh"]
    if control.overlaps:
        facts.append(f"{several((control.max_staleness + 1) * plan.prompts_per_rollout, 'group')} under way while the trainer computes")
    elif control.over_sample > 1:
        left = "go on later" if control.partial else "are aborted"
        facts.append(f"{ceil(control.over_sample * plan.prompts_per_rollout)} groups played, those left over {left}")
    if control.filters:
        facts.append(f"dropped by {', '.join(each.name for each in control.filters)}")
    yield ok("; ".join(facts))
    if context.algorithm is not None and (advice := uncorrected(context.rl, context.algorithm)) is not None:
        yield warn(advice)
    if control.partial and control.over_sample == 1 and not control.filters:
        yield warn("control.partial has nothing to put off: as many groups are played as are wanted; set control.over_sample above 1")


def check_length(context: CheckContext) -> Iterator[Note]:
    """Check the length of the run."""
    config = context.config
    num_rows = len(need(context.source, "the training rows"))
    rows, unit = context.program.rows, f"{context.program.unit}s"
    if rows is None:
        plan = need(context.batch, "the batch sizes")
        per_unit, steps, what = plan.prompts_per_rollout, plan.optimizer_steps, "prompts"
        context.total = length_of_run(num_rows, per_unit, context.rl.num_rollouts, context.rl.num_epochs, "num_rollouts")
        check_warmup(context.rl, context.total)
    else:
        per_unit, steps, what = rows.per_step(config), 1, rows.name
        context.total = length_of_run(num_rows, per_unit, context.steps.num_steps, context.steps.num_epochs, "num_steps")
    passes = context.total * per_unit / num_rows
    yield ok(f"{context.total} {unit} of {per_unit} {what}, {passes:.2f} passes over {num_rows}; {context.total * steps} optimizer steps")
    if per_unit > num_rows:
        yield warn(f"{per_unit} {what} are taken at a time, but there are {num_rows}: some come several times in one of the {unit}")
    warmup = config.train.optim.warmup_steps
    if warmup >= context.total * steps:
        yield warn(f"train.optim.warmup_steps is {warmup}, so the learning rate never reaches its peak: lower it or train longer")


def check_hooks(context: CheckContext) -> Iterator[Note]:
    """Find each function of the user's that the run calls, without calling it."""
    config = context.rl
    named = {key: reference for key, place in PLACES.items() if (reference := place.named(config)) is not None}
    for key, reference in named.items():
        try:
            run_user_code(f"{key} {reference!r}", lambda: find_hook(config, key), IMPORT_DEADLINE_S)  # noqa: B023
        except ConfigError as error:
            yield from map(fail, error.problems)
        except ValueError as error:
            yield fail(str(error))
        else:
            yield ok(f"{key} {reference} can be called as f({', '.join(PLACES[key].given)})")
    if not named:
        yield ok("none: every step of a rollout is whet's own")


def check_packages(context: CheckContext) -> Iterator[Note]:
    """Check threads, optional packages and trackers."""
    config = context.config
    if config.threads is not None and config.threads > usable_cores():
        yield warn(f"threads is {config.threads}, but this process may use {usable_cores()} cores: more threads are slower")
    for reference in config.observe.trackers:
        if reference in SERVICES:
            missing = find_spec(reference) is None
            yield fail(f"observe.trackers: {reference} is not installed: {install(reference)}, or leave it out") if missing else ok(
                f"{reference} is there"
            )
            continue
        tracker = run_user_code(f"tracker {reference!r}", lambda: resolve(reference, kind="tracker"), IMPORT_DEADLINE_S)  # noqa: B023
        if callable(tracker):
            yield ok(f"tracker {reference} can be called")
        else:
            yield fail(f"observe.trackers: {reference!r} is a {type(tracker).__name__}, not a callable (run_dir, config) -> Tracker")
    if not config.observe.trackers:
        yield ok("metrics go to metrics.jsonl alone: no further package is asked for")


def check_ports(context: CheckContext) -> Iterator[Note]:
    """Report the network ports that the run listens on."""
    yield ok("none: one process, nothing listens")
