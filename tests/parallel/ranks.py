"""Several ranks on one machine, in a fraction of a second: forks of this process, which has imported everything already."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

TIMEOUT_S = 60


def on_ranks(num_ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(*args)` returns on each rank of a gloo group.

    Tensors come back as they are, through a file. A rank that fails takes the others with it, and the test fails with its traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        started = [context.Process(target=_rank, args=(rank, num_ranks, there, work, args)) for rank in range(num_ranks)]
        for process in started:
            process.start()
        failed = _wait(started, there)
        if failed:
            raise AssertionError("\n".join(failed))
        return [torch.load(there / f"result_{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _wait(started: list[Any], there: Path) -> list[str]:
    """The tracebacks of the ranks that failed. The others of a failed one's group wait for it in vain: they are ended."""
    left = list(started)
    while left:
        ready = multiprocessing.connection.wait([process.sentinel for process in left], timeout=TIMEOUT_S)
        ended = [process for process in left if process.sentinel in ready]
        for process in ended:
            process.join()
        if not ended or any(process.exitcode for process in ended):
            for process in left:
                process.kill()
                process.join()
            texts = [path.read_text() for path in sorted(there.glob("error_*.txt"))]
            return texts or [f"no rank ended within {TIMEOUT_S} s" if not ended else f"exit codes {[p.exitcode for p in started]}"]
        left = [process for process in left if process not in ended]
    return []


def _rank(rank: int, num_ranks: int, there: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{there / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=TIMEOUT_S))
        result = work(*args)
        torch.save(result, there / f"result_{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (there / f"error_{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


def in_fake_world(num_ranks: int, rank: int, work: Callable[..., Any], *args: Any) -> Any:
    """What `work(*args)` returns on one rank of a group whose exchanges do nothing, in a process of its own."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=_faked, args=(rank, num_ranks, Path(folder), work, args))
        process.start()
        failed = _wait([process], Path(folder))
        if failed:
            raise AssertionError("\n".join(failed))
        return torch.load(Path(folder) / "result.pt", weights_only=False)


def _faked(rank: int, num_ranks: int, there: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        torch.save(work(*args), there / "result.pt")
    except BaseException:
        (there / f"error_{rank}.txt").write_text(f"rank {rank} of {num_ranks}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)
