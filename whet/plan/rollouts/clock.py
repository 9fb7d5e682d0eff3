"""An event loop whose time is simulated: while everything waits, time jumps to what is due next."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")
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
    """A thread whose work takes simulated time: what `took` says after the work was done, in no time."""

    def __init__(self, took: Callable[[], float]) -> None:
        self._took = took

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        result: Future[T] = Future()
        found = fn(*args, **kwargs)
        asyncio.get_running_loop().call_later(self._took(), result.set_result, found)
        return result
