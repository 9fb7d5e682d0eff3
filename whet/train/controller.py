"""The controller of a job of several processes: rank 0 runs the loop, and broadcasts each collective call
before it makes the call itself.

Broadcast are calls of the models. The other ranks make the same calls, in the same order. A batch stays on
rank 0: the model's backend sends each rank its samples.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from whet.background import Background
from whet.calls.messages import RemoteCall
from whet.calls.methods import MethodKind, Target, invoke, methods_of
from whet.core.batch import TrainBatch
from whet.core.nonfinite import NonFinite
from whet.train.sending import broadcast_object
from whet.train.watchdog import RunStatus, Watchdog

T = TypeVar("T")

CALL_TIMEOUT = timedelta(days=7)
"""Time that ranks wait for a call: a rollout or an evaluation may take long. They end at once when the
controller does."""
LOSSES = "losses"
"""Name of what has the losses: each rank computes them with its own."""
JOB = "job"
"""Target of the first call of a run."""


def begin_call(num_steps: int) -> RemoteCall:
    """First call of a run: every rank makes its models. The controller has validated everything else.

    Args:
        num_steps: number of rollouts, or of steps without rollouts.
    """
    return RemoteCall(JOB, "begin", (num_steps,))


class Controller(Protocol):
    """Has all ranks of a job make the same calls."""

    def broadcast(self, call: RemoteCall) -> AbstractContextManager[None]:
        """Have the other ranks make a call; in the context this rank makes the call itself.

        Raises:
            RankHung: if a rank does not come to an exchange in time, now or earlier.
        """
        ...

    def share(self, name: str, held: object) -> None:
        """Have calls name an object that they refer to: each rank has one of its own.

        Args:
            name: of the object.
            held: this rank's.
        """
        ...

    def control(self, target: str, held: T, interface: type) -> T:
        """The same object, whose methods are broadcast first. It is shared by its name.

        Args:
            target: name of the object in calls.
            held: this rank's part of it.
            interface: protocol or class whose methods are collective; others are this rank's alone.
        """
        ...

    def report_status(self, source: Callable[[], RunStatus]) -> None:
        """Set the source of the facts about the run that are written down if a rank hangs."""
        ...


class LocalController:
    """Controller of a run of one process."""

    def broadcast(self, call: RemoteCall) -> AbstractContextManager[None]:
        return nullcontext()

    def share(self, name: str, held: object) -> None:
        pass

    def control(self, target: str, held: T, interface: type) -> T:
        return held

    def report_status(self, source: Callable[[], RunStatus]) -> None:
        pass


LOCAL = LocalController()


class Job:
    """The ranks of a job. Every rank makes one, once the default process group is there; that of rank 0 is
    the controller.

    Args:
        watchdog: reaction to an expired exchange.
    """

    def __init__(self, watchdog: Watchdog) -> None:
        self.is_controller = dist.get_rank() == 0
        self._watchdog = watchdog
        group = dist.new_group(backend="gloo", timeout=CALL_TIMEOUT)
        assert isinstance(group, ProcessGroup)
        self._group = group
        self._shared: dict[str, object] = {}
        self._calling = threading.Lock()
        """Lock of a call: another thread may have one to make, too."""

    @contextmanager
    def broadcast(self, call: RemoteCall) -> Generator[None]:
        assert self.is_controller, "one rank sends calls"
        with self._calling:
            self._pass(call)
            with self.running(call):
                yield

    def share(self, name: str, held: object) -> None:
        self._shared[name] = held

    def control(self, target: str, held: T, interface: type) -> T:
        self.share(target, held)
        return cast(T, Controlled(self, target, held, interface))

    def report_status(self, source: Callable[[], RunStatus]) -> None:
        self._watchdog.report_status(source)

    @contextmanager
    def running(self, call: RemoteCall) -> Generator[None]:
        """Context of a call that this rank makes. The first call makes groups; after it every group has a
        deadline, except for the one that carries calls."""
        with self._watchdog.watch(f"{call.target}.{call.method}"):
            yield
        if call.target == JOB:
            self._watchdog.set_deadlines(self._group)

    def end(self) -> None:
        """Announce that no further call comes."""
        self._pass(None)

    def next_call(self) -> RemoteCall | None:
        """The controller's next call, waited for; None: no further call comes."""
        return self._pass(None)

    def serve_calls(self, targets: Mapping[str, Target]) -> None:
        """Make the controller's calls until there are no more.

        A step with NaN is reported by the controller; any other failure ends this process, and so the job.

        Args:
            targets: objects by their names in calls.
        """
        for name, target in targets.items():
            self.share(name, target.held)
        background, writing = Background("checkpoint"), Future[None]()
        writing.set_result(None)
        while (call := self.next_call()) is not None:
            with self.running(call), suppress(NonFinite):
                kind, found = invoke(targets, call)
                if kind is MethodKind.STREAM:
                    for _ in found:  # each weight is put together by all
                        pass
                elif kind is MethodKind.DEFERRED:
                    writing = background.do(found)
        with suppress(OSError):  # the controller has got it, too
            writing.result()

    def _pass(self, call: RemoteCall | None) -> RemoteCall | None:
        """Send the controller's call to the other ranks."""
        self._watchdog.check()
        with self._watchdog.watch("between calls"):
            return broadcast_object(call, self._group, self._shared)


class Controlled:
    """An object whose methods are broadcast to the other ranks first. Its other attributes are the object's.

    Of arguments, a controlled object reaches them as their own, a batch as None. Args as for `Controller.control`.
    """

    def __init__(self, job: Job, target: str, held: object, interface: type) -> None:
        self._job, self._target, self._held, self._methods = job, target, held, methods_of(interface)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._held, name)
        return partial(CALLS[self._methods[name]], self, name, found) if name in self._methods else found

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(arg._held if isinstance(arg, Controlled) else arg for arg in args)
        sent = tuple(None if isinstance(arg, TrainBatch) else arg for arg in args)
        with self._job.broadcast(RemoteCall(self._target, name, sent, kwargs)):
            return method(*args, **kwargs)

    def _stream(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[Any]:
        """To be read to its end, once."""
        with self._job.broadcast(RemoteCall(self._target, name, args, kwargs)):
            yield from method(*args, **kwargs)

    def _defer(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], None]:
        rest = self._call(name, method, *args, **kwargs)

        def together() -> None:
            with self._job.running(RemoteCall(self._target, "write", args, kwargs)):
                rest()

        return together


CALLS = {MethodKind.VALUE: Controlled._call, MethodKind.STREAM: Controlled._stream, MethodKind.DEFERRED: Controlled._defer}
