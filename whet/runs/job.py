"""Commands that train, in the processes of a job: one runs the command, the others compute with it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from whet.build.learners import algorithm_of, build_learners, check_warmup
from whet.build.process import prepare_process
from whet.build.programs import StepUnit, build_supervised, program_of
from whet.build.reward_models import SpreadScores
from whet.calls.methods import Target
from whet.check.auto import Chosen, auto_degrees, with_degrees
from whet.checkpoint.random_state import RANDOM, RandomStates
from whet.cluster.local import RENDEZVOUS, run_local
from whet.cluster.ray_job import run_on_ray
from whet.data.hub import resolve_model_path
from whet.model.causal import pick_device
from whet.observe.build_display import build_display
from whet.runs import commands, supervised
from whet.settings.rl import BaseRunConfig, RunConfig
from whet.settings.supervised import kind_of
from whet.stop import SIGNALS, Stopped
from whet.train.base import Annotator, Mirror
from whet.train.batching import plan_batch
from whet.train.build import build_backend
from whet.train.controller import LOCAL, LOSSES, Job
from whet.train.watchdog import Watchdog
from whet.types import STOPS

Settings = TypeVar("Settings", bound=BaseRunConfig)

RANK = ("-m", "whet.runs.rank")
"""Arguments of the interpreter in a process of a job."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable in the environment of a process that torchrun started."""
START_TIMEOUT = timedelta(minutes=30)
"""Time that a process waits for the others until all have their models; afterwards it is
`train.exchange_timeout_s`.
"""


def train(config: BaseRunConfig, command: str | None = None, notes: tuple[str, ...] = ()) -> None:
    """Train in as many processes as `train.parallel` asks for: this one, those that torchrun started, or new
    ones.

    Args:
        config: settings of a command that trains.
        command: the typed command line, which also resumes the run.
        notes: notes of the start, shown first.

    Raises:
        ValueError: if torchrun started another number of processes than the degrees ask for.
        JobFailed: if a process of the job did not end well.
        SystemExit: with the status of the controller that ended the job, and printed the reason.
    """
    command = command or f"whet {kind_of(config)}"
    if "WORLD_SIZE" in os.environ:
        if config.cluster.backend == "ray" and TORCHRUN in os.environ:
            raise ValueError("cluster.backend=ray has Ray start the processes, but torchrun has started this one: use one of the two")
        count = int(os.environ["WORLD_SIZE"])
        if config.train.parallel != "auto":
            check_count(num_ranks_of(config), count, f"whet {kind_of(config)}")
        elif count == 1:
            config = with_degrees(config, None)
        return alone(config, command, notes) if count == 1 else join(config, command, notes)
    if config.train.parallel == "auto":
        config = settled_here(config)
    wanted = num_ranks_of(config)
    if wanted == 1 and config.cluster.backend == "local":
        return alone(config, command, notes)
    status = launch(config, command, wanted, notes)
    if status:
        raise SystemExit(status)


def alone(config: BaseRunConfig, command: str, notes: tuple[str, ...]) -> None:
    """Run the command in this process."""
    RUNS[program_of(config).unit](config, command, LOCAL, notes)


def launch(config: BaseRunConfig, command: str, num_ranks: int, notes: tuple[str, ...]) -> int:
    """Run the job in processes of its own, and wait for their end. Returns the controller's exit status."""
    settings = config.model_dump(mode="json", exclude_unset=True)
    line = json.dumps({"kind": kind_of(config), "config": settings, "command": command, "notes": notes})
    if config.cluster.backend == "ray":
        num_engines, gpus_each = config.engine_places
        return run_on_ray(config.cluster, num_ranks, num_engines, RANK, line, Path(config.run_dir), gpus_each)
    return run_local(num_ranks, RANK, line, Path(config.run_dir))


def join(config: BaseRunConfig, command: str, notes: tuple[str, ...]) -> None:
    """Do this process's part of a job."""
    with joined(config) as job:
        config, chosen = settled(config, job)
        if not job.is_controller:
            return serve_calls(config, job)
        try:
            RUNS[program_of(config).unit](config, command, job, (*notes, *chosen))
        except (*STOPS, Stopped, KeyboardInterrupt):
            with suppress(RuntimeError):  # if the others failed too, nobody listens
                job.end()
            raise
        job.end()


def num_ranks_of(config: BaseRunConfig) -> int:
    """Number of processes that the degrees ask for."""
    degrees = config.train.degrees
    return 1 if degrees is None else degrees.num_ranks


def settled_here(config: Settings) -> Settings:
    """Choose the degrees of `auto` for all of this machine's devices. Returns the settings with them, and the
    reasons.

    Raises:
        ValueError: if nothing fits, or another machine's devices are asked for.
    """
    if config.cluster.backend != "local":
        raise ValueError(
            "train.parallel=auto does not know how many devices the cluster is to give: write the degrees; `whet plan MODEL --devices N` "
            "shows which"
        )
    count = torch.cuda.device_count()
    if count < 2:
        return with_degrees(config, None)
    chosen = auto_degrees(config, count, count)
    display = build_display("plain", ())
    for note in chosen.notes:
        display.note(note)
    return with_degrees(config, chosen.degrees)


def settled(config: Settings, job: Job) -> tuple[Settings, tuple[str, ...]]:
    """Choose the degrees of `auto` on the controller, for all processes. Returns the settings with them, and the
    reasons.

    Raises:
        ValueError: if nothing fits, in every process.
    """
    if config.train.parallel != "auto":
        return config, ()
    chosen: Chosen | ValueError | None = None
    if job.is_controller:
        try:
            count = os.environ["WORLD_SIZE"]
            chosen = auto_degrees(config, int(count), int(os.environ.get("LOCAL_WORLD_SIZE", count)))
        except ValueError as error:
            chosen = error
    passed = [chosen]
    dist.broadcast_object_list(passed, src=0)
    (found,) = passed
    if isinstance(found, ValueError):
        raise found
    assert found is not None
    return with_degrees(config, found.degrees), found.notes


def check_count(wanted: int, count: int, command: str) -> None:
    """Refuse a job whose number of processes is not that of the degrees.

    Raises:
        ValueError: with both numbers.
    """
    if wanted != count:
        raise ValueError(
            f"train.parallel asks for {wanted} processes (replicate x shard x context x tensor), but this job has {count}: start it with "
            f"torchrun --nproc-per-node {wanted} -m {command} ..., start it without torchrun, or change the degrees"
        )


@contextmanager
def joined(config: BaseRunConfig) -> Iterator[Job]:
    """Join the job that this process was started for, by torchrun or in the same way: the environment
    describes it.
    """
    backend = "gloo"
    if pick_device(config.model.device).type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = os.environ.get(RENDEZVOUS)
    init_method = "env://" if rendezvous is None else f"file://{rendezvous}"
    # NCCL ends a process whose exchange takes longer: the watchdog comes first, and says which process did not come.
    longest = max(START_TIMEOUT, timedelta(seconds=2 * config.train.exchange_timeout_s))
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=count, timeout=longest)
    watchdog = Watchdog(Path(config.run_dir), config.train.exchange_timeout_s)
    try:
        yield Job(watchdog)
    finally:
        watchdog.close()
        dist.destroy_process_group()


def serve_calls(config: BaseRunConfig, job: Job) -> None:
    """Make the same models as the controller, and serve its calls to the end of the run.

    A signal that asks the run to end is the controller's to answer: it saves, which takes all processes.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    first = job.next_call()
    if first is None:
        return
    prepare_process(config)
    with job.running(first):
        models = MODELS[program_of(config).unit](config, job, *first.args)
    targets = {name: Target(model, Mirror) for name, model in models.items()}
    job.serve_calls({**targets, RANDOM: Target(RandomStates(), RandomStates)})


def models_of_rollouts(config: RunConfig, job: Job, num_rollouts: int) -> dict[str, Annotator]:
    """Models of `whet train`."""
    plan, folder, algorithm = plan_batch(config.batch), resolve_model_path(config.model.path), algorithm_of(config)
    model = program_of(config).model.load(config, folder)
    policy = build_backend(config.train, model, check_warmup(config, num_rollouts) * plan.optimizer_steps)
    learners = build_learners(config, policy, folder, algorithm, plan, num_rollouts)
    job.share(LOSSES, algorithm)
    return {**learners.models.by_name, **SpreadScores(config).load()}


def models_of_steps(config: BaseRunConfig, job: Job, num_steps: int) -> dict[str, Annotator]:
    """Models of the commands that learn from given data."""
    folder = resolve_model_path(config.model.path)
    learner = build_supervised(config, folder, program_of(config).model.load(config, folder), num_steps)
    job.share(LOSSES, learner.loss)
    return learner.models.by_name


RUNS: dict[StepUnit, Callable[..., object]] = {"rollout": commands.train, "step": supervised.train_on_data}
"""Function that the controller runs, given the settings, the typed command, the controller and the notes."""
MODELS: dict[StepUnit, Callable[..., dict[str, Annotator]]] = {"rollout": models_of_rollouts, "step": models_of_steps}
"""Function that makes the models of the other processes, given the settings, the job and the length of the run.
Returns models by their names in calls.
"""
