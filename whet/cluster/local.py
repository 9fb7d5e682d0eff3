"""The processes of a job on this machine, without Ray."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from whet.cluster.process import Command, LocalProcess, OnEvent, Process
from whet.cluster.supervise import LOG, SupervisedJob

RENDEZVOUS = "WHET_RENDEZVOUS"
"""In the environment of a process of a local job: the file by which the processes find each other. No port is opened for it."""


def place_of(rank: int, local_rank: int, num_ranks: int) -> dict[str, str]:
    """A process's place in its job, by the names that torchrun uses."""
    return {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(num_ranks)}


def on_one_machine(num_ranks: int) -> dict[str, str]:
    """Environment of processes on one machine, except where this process's environment differs."""
    wanted = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // num_ranks))}
    if sys.platform == "linux":  # they need no other way to each other
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    return {key: os.environ.get(key, value) for key, value in wanted.items()}


@contextmanager
def rendezvous_file() -> Iterator[dict[str, str]]:
    """A file by which processes of this machine find each other, in a folder that is this user's alone; as their environment tells it."""
    with tempfile.TemporaryDirectory(prefix="whet-job-") as folder:
        yield {RENDEZVOUS: str(Path(folder) / "store")}


def run_local(num_ranks: int, arguments: Sequence[str], line: str, run_dir: Path) -> int:
    """Run a job of several processes on this machine. The first has this one's terminal.

    Args:
        num_ranks: processes.
        arguments: arguments of the interpreter.
        line: first line of each process's standard input.
        run_dir: folder of the others' log.

    Returns:
        The controller's exit status.

    Raises:
        JobFailed: as `SupervisedJob.run`.
    """
    with rendezvous_file() as rendezvous:
        shared = {**on_one_machine(num_ranks), **rendezvous}

        def start(rank: int, on_event: OnEvent) -> Process:
            environment = {**shared, **place_of(rank, rank, num_ranks)}
            return LocalProcess(Command(tuple(arguments), line, environment, speaks=rank > 0), on_event)

        return SupervisedJob(num_ranks, run_dir / LOG).run(start)
