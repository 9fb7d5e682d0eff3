"""Blocking functions on daemon threads: one that hangs costs its own call, not the others' turn and not the process's
exit."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

MAX_THREADS = 32
MAX_HUNG = 64


class CallTimeout(TimeoutError):
    """A call's limit ran out; any other TimeoutError is the function's own."""


@dataclass(slots=True, eq=False)
class _Job:
    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    started: asyncio.Future[None]
    done: asyncio.Future[tuple[Any, BaseException | None]]
    """Result and exception of the function: in a tuple, since a future does not carry every exception
    (StopIteration)."""
    running: bool = False
    abandoned: bool = False


class DaemonThreads:
    """Runs functions on a thread each. Python cannot kill a thread: one whose caller gave up no longer takes a place.

    Args:
        max_threads: functions that run at a time, abandoned ones apart; more wait.
        max_hung: abandoned functions that may still be running; then no other is started.
    """

    def __init__(self, max_threads: int = MAX_THREADS, max_hung: int = MAX_HUNG) -> None:
        self._max_threads = max_threads
        self._max_hung = max_hung
        self._lock = threading.Lock()
        self._waiting: deque[_Job] = deque()
        self._num_running = 0
        self._num_hung = 0

    @property
    def num_hung(self) -> int:
        """Abandoned functions that still run."""
        return self._num_hung

    async def run(self, function: Callable[[], Any], timeout_s: float | None) -> Any:
        """Run a function on a thread: its result, or its exception.

        Args:
            function: called once, on a thread.
            timeout_s: seconds that it may take, from when it starts; None: any time.

        Raises:
            CallTimeout: it took longer. It runs on, and its result is dropped.
            RuntimeError: too many functions hang already, or it raised what is no `Exception` (such as SystemExit).
        """
        if self._num_hung >= self._max_hung:
            raise RuntimeError(
                f"{self._num_hung} calls still run although their time was over; "
                "a function that waits needs a timeout of its own"
            )
        loop = asyncio.get_running_loop()
        job = _Job(function, loop, loop.create_future(), loop.create_future())
        with self._lock:
            self._waiting.append(job)
            self._start_waiting()
        try:
            await job.started
            async with asyncio.timeout(timeout_s):
                result, error = await job.done
        except TimeoutError as late:  # no other can be: what the function raised is in `error`
            raise CallTimeout(f"longer than {timeout_s} s") from late
        finally:
            if not job.done.done() or job.done.cancelled():
                self._abandon(job)
        if error is None:
            return result
        if isinstance(error, Exception):
            raise error
        raise RuntimeError(f"the function raised {type(error).__name__}: {error}") from error

    def _start_waiting(self) -> None:
        """With the lock held: a thread for each job that has a place."""
        while self._waiting and self._num_running < self._max_threads:
            job = self._waiting.popleft()
            job.running = True
            self._num_running += 1
            threading.Thread(target=self._work, args=(job,), name="whet-tool", daemon=True).start()

    def _work(self, job: _Job) -> None:
        _tell(job.loop, job.started, None)
        outcome: tuple[Any, BaseException | None]
        try:
            outcome = job.function(), None
        except BaseException as error:  # carried to the caller of `run`
            outcome = None, error
        with self._lock:
            job.running = False
            if job.abandoned:
                self._num_hung -= 1
            else:
                self._num_running -= 1
            self._start_waiting()
        _tell(job.loop, job.done, outcome)

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            if job in self._waiting:
                self._waiting.remove(job)
            elif job.running:
                job.abandoned = True
                self._num_running -= 1
                self._num_hung += 1
                self._start_waiting()


def _tell(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: Any) -> None:
    """Settle a future of another thread's loop, unless nobody waits for it any more."""

    def settle() -> None:
        if not future.done():
            future.set_result(value)

    with suppress(RuntimeError):  # the loop is closed, so its waiter is gone
        loop.call_soon_threadsafe(settle)
