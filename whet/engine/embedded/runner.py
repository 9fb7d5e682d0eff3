"""The task that keeps an engine going: what was posted is applied on the event loop, steps and jobs run on a thread, one at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from whet.engine.base import EngineFailed

T = TypeVar("T")
CLOSED = "the engine was closed"


class Stepper(Protocol):
    """The object that a runner drives."""

    def may_step(self) -> bool:
        """True if a step has something to do, and may do it now."""
        ...

    def step(self) -> Any:
        """One step, on the thread."""
        ...

    def landed(self, result: Any) -> None:
        """Take a step's result, on the event loop."""
        ...

    def failed(self, reason: str, cause: BaseException | None) -> None:
        """Called after a step raised, or the runner was stopped: every caller that waits for a step
        must get an error."""
        ...


@dataclass(slots=True, eq=False)
class _Job:
    """Work for the thread between two steps, and who waits for it."""

    work: Callable[[], Any]
    done: asyncio.Future[Any]
    is_step: bool
    """True if the job may take as long as a step."""


class Runner:
    """Drives a stepper. Its task lives only while there is something to do, so an idle one is bound to
    no event loop.

    The stepper's objects are touched by this task alone: on the event loop between two steps, on the
    thread during one.

    Args:
        stepper: takes the steps.
        thread: runs the steps; one thread.
    """

    def __init__(self, stepper: Stepper, thread: Executor) -> None:
        self._stepper, self._thread = stepper, thread
        self._posted: deque[Callable[[], None]] = deque()
        self._jobs: deque[_Job] = deque()
        self._task: asyncio.Task[None] | None = None
        self._flight: Future[Any] | None = None
        self._took_off: float | None = None
        """When the step, or what takes as long, began that is on the thread just now."""
        self._closed = False
        self.busy_s = 0.0
        """Seconds spent in steps."""

    @property
    def step_s(self) -> float:
        """Seconds that the step on the thread, or a job as long as a step, has taken so far; 0: none is
        running."""
        return 0.0 if self._took_off is None else time.perf_counter() - self._took_off

    def check_open(self) -> None:
        """Refuse a call after the engine was closed.

        Raises:
            EngineFailed: if it was closed.
        """
        if self._closed:
            raise EngineFailed("the engine is closed")

    def post(self, action: Callable[[], None]) -> None:
        """Have `action` applied on the event loop before the next step."""
        self._posted.append(action)
        self.kick()

    async def between_steps(self, work: Callable[[], T], *, is_step: bool = False) -> T:
        """Run `work` on the thread before the next step; `is_step`: it should take no longer than one.

        Raises:
            EngineFailed: if the runner is closed before it is done. What `work` raises is raised here.
        """
        self.check_open()
        job = _Job(work, asyncio.get_running_loop().create_future(), is_step)
        self._jobs.append(job)
        self.kick()
        return await job.done

    def kick(self) -> None:
        """See that the task looks again whether there is something to do."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # something was posted after the loop had ended: it is applied with what comes next
            return
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run(), name="engine")
        elif self._task.get_loop() is not loop:
            raise RuntimeError("the engine still serves another event loop: end its requests or close the engine there")

    async def settle(self) -> None:
        """Wait for what is on the thread just now."""
        if self._flight is not None:
            await asyncio.wait([asyncio.wrap_future(self._flight)])

    async def close(self) -> None:
        """Wait for a running step, then tell everyone who waits that it is over."""
        self._closed = True
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        self._stop()

    async def _run(self) -> None:
        try:
            while True:
                self._apply_posted()
                if self._jobs:
                    await self._do_job()
                elif self._stepper.may_step():
                    await self._step()
                else:
                    return
        except asyncio.CancelledError:  # by close(), or with its event loop
            self._stop()
            raise

    def _apply_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    async def _step(self) -> None:
        try:
            result = await self._on_thread(self._timed, is_step=True)
        except Exception as error:  # whatever a model can raise
            self._stepper.failed(f"a step failed: {type(error).__name__}: {error}", error)
        else:
            self._stepper.landed(result)

    def _timed(self) -> Any:
        began = time.perf_counter()
        try:
            return self._stepper.step()
        finally:
            self.busy_s += time.perf_counter() - began

    async def _do_job(self) -> None:
        job = self._jobs[0]  # stays in the queue meanwhile: should the task be cancelled, its waiter is notified
        if not job.done.done():
            await self._answer(job)
        self._jobs.popleft()

    async def _answer(self, job: _Job) -> None:
        try:
            result, error = await self._on_thread(job.work, is_step=job.is_step), None
        except Exception as fault:  # belongs to the caller
            result, error = None, fault
        if job.done.done():  # nobody waits any more
            return
        if error is None:
            job.done.set_result(result)
        else:
            job.done.set_exception(error)

    async def _on_thread(self, work: Callable[[], T], *, is_step: bool) -> T:
        """Run on the thread. If cancelled, it still waits for the end of running work: nothing else may
        run meanwhile."""
        self._took_off = time.perf_counter() if is_step else None
        flight = self._flight = self._thread.submit(work)
        try:
            return await asyncio.wrap_future(flight)
        except asyncio.CancelledError:
            if not flight.cancel():
                await asyncio.wait([asyncio.wrap_future(flight)])
            raise
        finally:
            self._flight = self._took_off = None

    def _stop(self) -> None:
        self._apply_posted()
        self._stepper.failed(CLOSED, None)
        while self._jobs:
            job = self._jobs.popleft()
            if not job.done.done():
                job.done.set_exception(EngineFailed(CLOSED))
