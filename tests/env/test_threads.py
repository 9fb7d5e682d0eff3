"""Blocking functions on daemon threads: bounded, abandoned when late, and never in the way of the process's exit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from whet.env.threads import CallTimeout, DaemonThreads


def run(coroutine):
    async def bounded():
        async with asyncio.timeout(20):
            return await coroutine

    return asyncio.run(bounded())


def raising(error):
    def function():
        raise error

    return function


def test_results_and_errors_come_back():
    threads = DaemonThreads()
    assert run(threads.run(lambda: threading.current_thread().daemon, 5)) is True
    with pytest.raises(KeyError, match="x"):
        run(threads.run(raising(KeyError("x")), 5))
    with pytest.raises(TimeoutError, match="socket") as own:
        run(threads.run(raising(TimeoutError("socket")), 5))
    assert not isinstance(own.value, CallTimeout)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_what_would_end_the_process_ends_the_call(error):
    with pytest.raises(RuntimeError, match=type(error).__name__):
        run(DaemonThreads().run(raising(error), 5))


def test_an_exhausted_iterator_is_an_error_and_no_hang():
    with pytest.raises(RuntimeError, match="StopIteration"):
        run(DaemonThreads().run(lambda: next(iter([])), 5))


def test_at_most_so_many_run_at_a_time():
    threads = DaemonThreads(max_threads=2)
    lock = threading.Lock()
    now = peak = 0
    both = threading.Barrier(2)

    def work():
        nonlocal now, peak
        with lock:
            now += 1
            peak = max(peak, now)
        both.wait(10)
        with lock:
            now -= 1

    async def main():
        await asyncio.gather(*(threads.run(work, 20) for _ in range(8)))

    run(main())
    assert peak == 2


def test_a_late_call_gives_its_place_away_and_is_forgotten():
    threads = DaemonThreads(max_threads=1, max_hung=2)
    release = threading.Event()

    async def main():
        for hung in (1, 2):
            with pytest.raises(CallTimeout, match=r"longer than 0\.01 s"):
                await threads.run(lambda: release.wait(30), 0.01)
            assert threads.num_hung == hung
        with pytest.raises(RuntimeError, match="2 calls still run although their time was over"):
            await threads.run(lambda: 1, 5)
        release.set()
        while threads.num_hung:
            await asyncio.sleep(0.001)
        assert await threads.run(lambda: 1, 5) == 1

    run(main())


def test_waiting_for_a_place_is_not_the_call_s_time():
    threads = DaemonThreads(max_threads=1)
    first = threading.Event()

    async def main():
        busy = asyncio.ensure_future(threads.run(lambda: first.wait(20), None))
        waiting = asyncio.ensure_future(threads.run(lambda: "done", 0.05))
        await asyncio.sleep(0.2)
        first.set()
        assert await waiting == "done"
        assert await busy is True

    run(main())


def test_a_cancelled_call_never_starts_or_is_abandoned():
    threads = DaemonThreads(max_threads=1)
    release = threading.Event()
    started: list[str] = []

    async def main():
        running = asyncio.ensure_future(threads.run(lambda: release.wait(20), None))
        waiting = asyncio.ensure_future(threads.run(lambda: started.append("waiting"), None))
        await asyncio.sleep(0.01)
        for call in (waiting, running):
            call.cancel()
        await asyncio.gather(waiting, running, return_exceptions=True)
        assert threads.num_hung == 1
        assert await threads.run(lambda: "next", 5) == "next"
        release.set()

    run(main())
    assert started == []


def test_a_hung_function_does_not_keep_the_process():
    program = """
import asyncio, threading
from whet.env.tool_env import ToolEnv
from whet.env.tools import Tool
from whet.data.formats.hermes import parse_hermes

def stuck() -> str:
    "Never ends."
    threading.Event().wait()

async def main():
    env = ToolEnv([Tool(stuck)], timeout_s=0.05)
    try:
        await env.step(parse_hermes('<tool_call>{"name": "stuck"}</tool_call>'))
    except TimeoutError as late:
        print(late)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "tool stuck took longer than 0.05 s (env.tool_timeout_s)\n"), done.stderr
