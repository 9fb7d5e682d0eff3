"""A job of several processes: the leader runs the loop, and announces to the others which collective
call comes next.

Announced are calls of the models, or of all of them together (`Learners`), with the batch; the others
make the same calls, in the same order, and get the same results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from whet.algo.base import LossFunction, Need
from whet.background import Background
from whet.core.batch import TrainBatch
from whet.core.nonfinite import NonFinite
from whet.observe.metrics import Metrics
from whet.train.alarm import Alarm, Situation
from whet.train.base import Backend, Backward

PATIENCE = timedelta(days=7)
"""Time that the others wait for a call: a rollout or an evaluation may take long. They end at once when
the leader does."""
STAGE = "stage"
"""The method that returns a function to call concurrently with computation."""
STREAMS = ("named_weights", "named_state")
"""Methods that give weights one after another."""
LEARNERS = "learners"
"""Receiver of a call that is for all models together."""
JOB = "job"
"""Receiver of the first call of a run."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """The next call of all processes."""

    who: str
    """A model's name, or `LEARNERS`."""
    what: str
    """A method."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


def begin(num_steps: int) -> CollectiveCall:
    """First call of a run: every process makes its models. The leader has validated everything else.

    Args:
        num_steps: number of rollouts, or of steps without rollouts.
    """
    return CollectiveCall(JOB, "begin", (num_steps,))


class Lead(Protocol):
    """Tells the other processes of a job what comes next."""

    def tell(self, call: CollectiveCall) -> AbstractContextManager[None]:
        """For as long as this process makes the call itself.

        Raises:
            RankHung: if a process does not come to an exchange in time, now or earlier.
        """
        ...

    def describe(self, by: Callable[[], Situation]) -> None:
        """Set the source of the facts about the run that are kept if a process hangs."""
        ...

    def led(self, who: str, backend: Backend) -> Backend:
        """A model whose every call is announced first."""
        ...


class Alone:
    """A process that has nobody to tell."""

    def tell(self, call: CollectiveCall) -> AbstractContextManager[None]:
        return nullcontext()

    def describe(self, by: Callable[[], Situation]) -> None:
        pass

    def led(self, who: str, backend: Backend) -> Backend:
        return backend


ALONE = Alone()


class Job:
    """The processes of a job. Every one makes one of these, once the default process group is there.

    Args:
        alarm: reaction to an expired exchange.
    """

    def __init__(self, alarm: Alarm) -> None:
        self.leads = dist.get_rank() == 0
        self._alarm = alarm
        group = dist.new_group(backend="gloo", timeout=PATIENCE)
        assert isinstance(group, ProcessGroup)
        self._group = group
        self._telling = threading.Lock()
        """Held while a call is made: another thread may have one to tell, too."""

    @contextmanager
    def tell(self, call: CollectiveCall) -> Generator[None]:
        assert self.leads, "only one process leads"
        with self._telling:
            self._pass(call)
            with self.over(call):
                yield

    def describe(self, by: Callable[[], Situation]) -> None:
        self._alarm.describe(by)

    @contextmanager
    def over(self, call: CollectiveCall) -> Generator[None]:
        """Context of a call that this process makes. The first call makes groups; after it every group
        has a deadline, except for the one over which calls come."""
        with self._alarm.over(f"{call.who}.{call.what}"):
            yield
        if call.who == JOB:
            self._alarm.bound(self._group)

    def led(self, who: str, backend: Backend) -> Backend:
        return Led(who, backend, self)

    def end(self) -> None:
        """No further call comes."""
        self._pass(None)

    def begins(self) -> CollectiveCall | None:
        """The leader's `begin`, waited for; None: it did not come as far as to make models."""
        return self._pass(None)

    def follow(self, models: Mapping[str, Any]) -> None:
        """Make the announced calls, until there are no more.

        A step with NaN is reported by the leader; any other failure ends this process, and so the job.

        Args:
            models: models by their names in the calls.
        """
        background, writing = Background("checkpoint"), Future[None]()
        writing.set_result(None)
        while (call := self._pass(None)) is not None:
            with self.over(call), suppress(NonFinite):
                found = getattr(models[call.who], call.what)(*call.args, **call.kwargs)
                if call.what in STREAMS:
                    for _ in found:  # each weight is put together by all
                        pass
                elif call.what == STAGE:
                    writing = background.do(found)
        with suppress(OSError):  # which the leader has heard, too
            writing.result()

    def _pass(self, call: CollectiveCall | None) -> CollectiveCall | None:
        self._alarm.check()
        passed = [call]
        with self._alarm.over("between calls"):
            dist.broadcast_object_list(passed, src=0, group=self._group)
        return passed[0]


class Led:
    """A model whose every call is announced to the other processes first.

    Args:
        who: its name.
        backend: this process's part of it.
        job: the processes.
    """

    def __init__(self, who: str, backend: Backend, job: Job) -> None:
        self._who, self._backend, self._job = who, backend, job
        self.notes, self.dtype = backend.notes, backend.dtype

    @property
    def flops(self) -> int:
        return self._backend.flops

    def annotate(self, batch: TrainBatch, need: Need) -> TrainBatch:
        with self._tell("annotate", batch, need):
            return self._backend.annotate(batch, need)

    def forward_backward(self, batch: TrainBatch, loss: LossFunction, *, entropy_grad: bool = False) -> Backward:
        with self._tell("forward_backward", batch, loss, entropy_grad=entropy_grad):
            return self._backend.forward_backward(batch, loss, entropy_grad=entropy_grad)

    def optim_step(self) -> Metrics:
        with self._tell("optim_step"):
            return self._backend.optim_step()

    def named_weights(self, kind: Literal["merged", "adapter"] = "merged") -> Iterable[tuple[str, Tensor]]:
        """A stream that is to be read to its end, once."""
        with self._tell("named_weights", kind):
            yield from self._backend.named_weights(kind)

    def named_state(self) -> Iterable[tuple[str, Tensor]]:
        """As `named_weights`, with tied parameters under each of their names, and buffers."""
        with self._tell("named_state"):
            yield from self._backend.named_state()

    def export(self, folder: Path, base: str = "") -> None:
        with self._tell("export", folder, base):
            self._backend.export(folder, base)

    def export_merged(self, folder: Path) -> None:
        with self._tell("export_merged", folder):
            self._backend.export_merged(folder)

    def save(self, folder: Path) -> None:
        with self._tell("save", folder):
            self._backend.save(folder)

    def stage(self, folder: Path) -> Callable[[], None]:
        call = CollectiveCall(self._who, STAGE, (folder,))
        with self._job.tell(call):
            write = self._backend.stage(folder)

        def together() -> None:
            with self._job.over(CollectiveCall(self._who, "write", (folder,))):
                write()

        return together

    def load(self, folder: Path, *, weights: bool = True, optimizer: bool = True) -> None:
        with self._tell("load", folder, weights=weights, optimizer=optimizer):
            self._backend.load(folder, weights=weights, optimizer=optimizer)

    def _tell(self, what: str, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return self._job.tell(CollectiveCall(self._who, what, args, kwargs))
