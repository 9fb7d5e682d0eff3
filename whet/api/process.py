"""Runs of this process: under a running event loop, with callbacks on the caller's thread."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from whet.observe.notebook import in_notebook
from whet.observe.watch import WATCH, Watch
from whet.stop import on_signals

T = TypeVar("T")
POLL_S = 0.1
"""Seconds between two looks at the signals while a run works on another thread."""
_Task = tuple[Callable[[], Any], "Future[Any]"]


class CallerThread:
    """The thread that a run was started from. Functions that the run calls in there may draw and print."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()

    def call(self, function: Callable[[], T]) -> T:
        """The result of a function on the caller's thread, from any thread."""
        if threading.get_ident() == self._thread:
            return function()
        future: Future[T] = Future()
        self._tasks.put((function, future))
        return future.result()

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`: on this thread if no event loop runs in it, else on one of its own, while this one makes the calls."""
        if not _loop_runs():
            return work()
        done: Future[T] = Future()
        context = contextvars.copy_context()
        with on_signals(leaves=not in_notebook()):
            threading.Thread(target=lambda: _settle(done, lambda: context.run(work)), name="whet-run", daemon=True).start()
            while not done.done():
                try:
                    function, future = self._tasks.get(timeout=POLL_S)
                except queue.Empty:
                    continue
                _settle(future, function)
        return done.result()


def _settle(future: Future[Any], function: Callable[[], Any]) -> None:
    """Give a future the function's result, or what it raised."""
    try:
        future.set_result(function())
    except BaseException as error:  # carried to the thread that waits for it
        future.set_exception(error)


def _loop_runs() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


@contextmanager
def watched(watch: Watch | None) -> Iterator[None]:
    """Context in which runs have this watch."""
    token = WATCH.set(watch)
    try:
        yield
    finally:
        WATCH.reset(token)
