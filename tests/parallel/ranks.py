"""Several ranks on one machine, in a fraction of a second: forks of this process, which has imported everything already."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import socket
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
    """What `work(*args)` returns on each rank of a gloo group."""
    return _forked(num_ranks, _rank, work, args)


def in_fake_world(num_ranks: int, rank: int, work: Callable[..., Any], *args: Any) -> Any:
    """What `work(*args)` returns on one rank of a group whose exchanges do nothing."""
    return _forked(1, _faked, num_ranks, rank, work, args)[0]


def _forked(num_processes: int, body: Callable[..., None], *args: Any) -> list[Any]:
    """What each process left in its file. One that fails takes the others with it, and the test fails with its traceback."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder)
        started = [context.Process(target=_guarded, args=(body, rank, num_processes, there, *args)) for rank in range(num_processes)]
        gc.collect()
        gc.freeze()  # else a child may take apart what an earlier test left, whose threads it does not have
        for process in started:
            process.start()
        gc.unfreeze()
        failed = _wait(started, there)
        if failed:
            raise AssertionError("\n".join(failed))
        return [torch.load(there / f"result_{rank}.pt", weights_only=False) for rank in range(num_processes)]


def _guarded(body: Callable[..., None], rank: int, num_processes: int, there: Path, *args: Any) -> None:
    stacks = (there / f"stacks_{rank}.txt").open("w")  # open as long as the process is
    faulthandler.dump_traceback_later(TIMEOUT_S - 5, file=stacks)
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        body(rank, num_processes, there, *args)
    except BaseException:
        (there / f"error_{rank}.txt").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        os._exit(1)
    os._exit(0)


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
            texts = [path.read_text() for path in sorted(there.glob("error_*.txt")) or sorted(there.glob("stacks_*.txt"))]
            return texts or [f"no rank ended within {TIMEOUT_S} s" if not ended else f"exit codes {[p.exitcode for p in started]}"]
        left = [process for process in left if process not in ended]
    return []


def _rank(rank: int, num_ranks: int, there: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    store = f"file://{there / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=TIMEOUT_S))
    torch.save(work(*args), there / f"result_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def _faked(_: int, __: int, there: Path, num_ranks: int, rank: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    torch.save(work(*args), there / "result_0.pt")


def as_job(num_ranks: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(*args)` returns in each process of a job that torchrun might have started: they make the process group themselves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return _forked(num_ranks, _member, port, work, args)


def _member(rank: int, num_ranks: int, there: Path, port: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    torch.save(work(*args), there / f"result_{rank}.pt")
