"""`whet train` in the processes of a job: one runs it, the others compute with it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from whet import commands
from whet.algo import StepPlan, build_algorithm
from whet.build import length_of_run, read_texts
from whet.build_learners import build_learners, check_models, check_warmup
from whet.model.causal import load_causal
from whet.process import prepare_process
from whet.settings import RunConfig
from whet.stop import SIGNALS, Stopped
from whet.train.batching import plan_batch
from whet.train.lead import LEARNERS, Job
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.mesh import ParallelConfig

EXCHANGE_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others in an exchange of tensors."""


def train(config: RunConfig, command: str = "whet train") -> Mapping[str, float]:
    """`commands.train`, in as many processes as `train.parallel` asks for; results are the leader's.

    Raises:
        ValueError: if the processes are not as many as the degrees ask for.
    """
    degrees = config.train.parallel
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1 and (degrees is None or degrees.num_ranks == 1):
        return commands.train(config, command)
    check_count(degrees, count)
    with joined() as job:
        if not job.leads:
            follow(config, job)
            return {}
        try:
            values = commands.train(config, command, job)
        except (*commands.STOPS, Stopped, KeyboardInterrupt):
            with suppress(RuntimeError):  # where the others failed too, nobody listens
                job.end()
            raise
        job.end()
        return values


def check_count(degrees: ParallelConfig | None, count: int) -> None:
    """Refuse a job of other processes than the degrees ask for.

    Raises:
        ValueError: with both numbers.
    """
    wanted = 1 if degrees is None else degrees.num_ranks
    if wanted != count:
        raise ValueError(
            f"train.parallel asks for {wanted} processes (replicate x shard x context x tensor), but this job has {count}: start it with "
            f"torchrun --nproc-per-node {wanted} -m whet train ..., or change the degrees"
        )


@contextmanager
def joined() -> Iterator[Job]:
    """The job that torchrun started this process for, by the environment that it gives."""
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=EXCHANGE_TIMEOUT)
    try:
        yield Job()
    finally:
        dist.destroy_process_group()


def follow(config: RunConfig, job: Job) -> None:
    """Make the models that the leader makes, and the calls that it tells, to the end of the run.

    A signal that asks the run to end is the leader's to answer: it saves, which takes all processes.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if not job.begins():
        return
    prepare_process(config)
    plan = plan_batch(config.batch)
    algorithm = build_algorithm(config.algo, StepPlan(plan.optimizer_steps, plan.samples_per_prompt, config.rollout.max_tokens))
    check_models(config, algorithm)
    texts = read_texts(config)
    source = commands.training_source(config, texts)
    num_rollouts = length_of_run(len(source), plan.prompts_per_rollout, config.num_rollouts, config.num_epochs, "num_rollouts")
    model = load_causal(texts.folder, config.model, trainable=True)
    policy = TorchBackend(model, config.train, check_warmup(config, num_rollouts) * plan.optimizer_steps)
    learners = build_learners(config, policy, texts.folder, algorithm, plan, num_rollouts)
    job.follow({LEARNERS: learners, "policy": policy, **learners.beside})
