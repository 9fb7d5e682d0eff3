"""An event loop whose time is simulated: while everything waits, time jumps to what is due next."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")
SLICES = 16
"""Parts of a piece of work, before each of which its pace is looked at."""
STUCK_S = 30.0
"""Real seconds to wait for a thread when nothing is due."""


class _Selector(selectors.SelectSelector):
    """Moves `now` on instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            ready = super().select(STUCK_S)
            if not ready:
                raise RuntimeError("the simulation is stuck: everything waits for something that never comes")
            return ready
        self.now += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with simulated time, in seconds from 0 on."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_simulated(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """The result of a coroutine on a `VirtualLoop`."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())


class SimulatedThread(Executor):
    """A thread whose work takes simulated time.

    Args:
        took: seconds of work that was just done, in no time.
        pace: seconds that a second of work takes at present.
        ended: called when a piece of work has ended.
    """

    def __init__(
        self, took: Callable[[], float], pace: Callable[[], float] = lambda: 1.0, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._took, self._pace, self._ended = took, pace, ended

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        result: Future[T] = Future()
        found, loop = fn(*args, **kwargs), asyncio.get_running_loop()
        slice_s = self._took() / SLICES

        def go_on(left: int) -> None:
            if left:
                loop.call_later(slice_s * self._pace(), go_on, left - 1)
            else:
                self._ended()
                result.set_result(found)

        go_on(SLICES if slice_s else 0)
        return result
