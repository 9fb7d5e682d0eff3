"""Supervision of a job's processes by their starter: the first that fails is named, and the others are
ended."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType

from whet.cluster.process import LAST_OUTPUT_S, OnEvent, OutputEnd, OutputLine, Process, ProcessEvent, ProcessExit
from whet.observe.display import printable, say
from whet.types import RunFailed

LAST_LINES = 20
"""Number of a process's last lines of output in the error that names it."""
GRACE_S = 5.0
"""Seconds for the others to end by themselves after one has failed: the controller writes down how the run
ended."""
FOLLOW_S = 60.0
"""Seconds for the others to end after the controller has ended well: they have nothing left to do."""
END_S = 30.0
"""Seconds for a killed process to be gone; one that waits for a disk takes long."""
LOG = "processes.log"
"""In the run's folder: the output of all processes but the controller, and the failure that ended the job."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
REPORTED, ERROR = 2, "error: "
"""Exit status of a command that ended with a message of its own, and the begin of its line."""

StartProcess = Callable[[int, OnEvent], Process]
"""Starts the process of a rank."""


class JobFailed(RunFailed):
    """A process of the job ended that should not have; the text names it, its end and its last lines."""


class SupervisedJob:
    """The processes of a job while they run. Rank 0 is the controller, and its output needs no prefix.

    Args:
        num_ranks: processes.
        log: a file for the output of the others; made when there is some.
    """

    def __init__(self, num_ranks: int, log: Path) -> None:
        self._events = SimpleQueue[tuple[int, ProcessEvent]]()
        self._last = [deque[str](maxlen=LAST_LINES) for _ in range(num_ranks)]
        self._running, self._heard = set(range(num_ranks)), set(range(num_ranks))
        self._failures: list[tuple[int, ProcessExit]] = []
        self._processes: list[Process] = []
        self._log = log

    def run(self, start: StartProcess) -> int:
        """Start all and wait for their end.

        Returns:
            The exit status of the controller, if it ended the job with an error of its own; 0: it ended well.

        Raises:
            JobFailed: if another one failed first, or the controller could not say why.
        """
        with self._signals_passed_on():
            try:
                for rank in range(len(self._last)):
                    self._processes.append(start(rank, self._on_event_of(rank)))
                while 0 in self._running and not self._failures:
                    self._next(None)
                if not self._failures:
                    self._wait(lambda: not self._running or bool(self._failures), FOLLOW_S)
                if self._failures:  # who else ends now ends because of that one, or is what that one ended because of
                    self._wait(lambda: not self._running, GRACE_S)
                failures, late = list(self._failures), sorted(self._running)
            finally:
                self._end()
        if not failures:
            for rank in late:
                text = f"warning: rank {rank} of {len(self._last)} had not ended {FOLLOW_S:g} s after the run had, and was killed"
                say(text, sys.stderr)
                self._write(text)
            return 0
        rank, ended = next((found for found in failures if _from_outside(found[1])), failures[0])
        if rank == 0 and ended.code is not None and ended.code > 1:  # a command's error, or a signal's: it has printed it
            return ended.code
        raise JobFailed(self._report(rank, ended))

    def _on_event_of(self, rank: int) -> OnEvent:
        return lambda event: self._events.put((rank, event))

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with suppress(Empty):
            while not done():
                self._next(max(0.0, deadline - time.monotonic()))

    def _next(self, timeout_s: float | None) -> None:
        """See to what happens next. Raises Empty if nothing does in time."""
        rank, event = self._events.get(timeout=timeout_s)
        match event:
            case ProcessExit():
                self._running.discard(rank)
                if event.code != 0:
                    self._failures.append((rank, event))
            case OutputLine():
                self._show(rank, event)
            case OutputEnd():
                self._heard.discard(rank)

    def _show(self, rank: int, line: OutputLine) -> None:
        self._last[rank].append(line.text)
        if rank == 0:
            say(line.text, sys.stderr if line.is_error else sys.stdout)
            return
        text = f"[rank {rank}] {printable(line.text)}"
        say(text, sys.stderr)
        self._write(text)

    def _write(self, text: str) -> None:
        """To the log; a disk that is full must not hide what is written there."""
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log, "a") as file:
                file.write(f"{text}\n")
        except OSError as error:
            say(f"warning: {self._log}: {error.strerror}", sys.stderr)

    def _report(self, rank: int, ended: ProcessExit) -> str:
        text = f"rank {rank} of {len(self._last)} {ended.how}, so the job has ended"
        errors = [line for line in self._last[rank] if line.startswith(ERROR)]
        if errors and ended.code == REPORTED:
            text = f"{errors[-1].removeprefix(ERROR)} (from rank {rank} of {len(self._last)})"
        elif self._last[rank]:
            text += ". Its last lines:\n" + "\n".join(f"    {printable(line)}" for line in self._last[rank])
        else:
            text += "; it printed nothing" if rank else "; its output is above"
        self._write(text)
        return text

    def _end(self) -> None:
        """End what is left, and read the output from before."""
        started = set(range(len(self._processes)))
        self._running &= started
        self._heard &= started
        for rank in self._running:
            self._processes[rank].kill()
        self._wait(lambda: not self._running, END_S)
        self._wait(lambda: not self._heard, LAST_OUTPUT_S)

    @contextmanager
    def _signals_passed_on(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM are the controller's to answer: it saves, and the others end with it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            for process in self._processes[:1]:
                process.signal(number)

        before = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _from_outside(ended: ProcessExit) -> bool:
    """True if a process was killed or is gone, so that it did not end because of another. A process
    that aborts may have: NCCL's watchdog aborts a process when another's connection breaks."""
    return ended.code is None or (ended.code < 0 and ended.code != -signal.SIGABRT)
