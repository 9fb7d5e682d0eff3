"""A process on this machine that is watched: its output line by line, and its end. Both sides of it.

It reads one line from its standard input, which tells it what to do, and ends when that is closed: it does not outlive its starter,
however that ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Protocol

from whet.runfolder.child_environment import child_environment

LONGEST_LINE = 64 * 1024
"""Bytes; a longer line comes in pieces."""
LEFT_ALONE = 3
"""The exit status of a process whose starter is gone."""
LAST_OUTPUT_S = 2.0
"""Seconds of reading its output after a process has ended: its children may hold its output open."""


@dataclass(frozen=True, slots=True)
class Command:
    """A Python program to start."""

    arguments: tuple[str, ...]
    """Arguments of the interpreter."""
    line: str = field(repr=False)
    """Line for its standard input, without a newline; it may hold a key."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Besides its starter's."""
    folder: str | None = None
    """Working directory, if such a folder exists; None: that of its starter."""
    speaks: bool = True
    """Report its output as `OutputLine`; false: it shares its starter's output, a terminal for example."""
    is_trainer: bool = True
    """Pass on all of its starter's environment, keys included, since it does the same work; false: only
    the variables that every process gets."""


@dataclass(frozen=True, slots=True)
class OutputLine:
    """A line of output."""

    text: str
    is_error: bool
    """It came over standard error."""


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """End of a process."""

    code: int | None
    """Its exit status, negative for a signal; None: it cannot be known."""
    how: str
    """In words that follow its name."""


@dataclass(frozen=True, slots=True)
class OutputEnd:
    """End of the output of a process that has ended."""


ProcessEvent = OutputLine | ProcessExit | OutputEnd
OnEvent = Callable[[ProcessEvent], None]
"""Called on other threads: with `ProcessExit` as soon as the process has ended, and with `OutputEnd` last; once
each."""


class Process(Protocol):
    """One that was started."""

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens if it has ended."""
        ...

    def kill(self) -> None:
        """End it and all that it started, at once."""
        ...


class LocalProcess:
    """A `Process` on this machine, in its own session: no key of the terminal's reaches it.

    Args:
        command: the process to start.
        on_event: called with its output and its end.

    Raises:
        OSError: if it cannot be started.
    """

    def __init__(self, command: Command, on_event: OnEvent) -> None:
        output = subprocess.PIPE if command.speaks else None
        folder = command.folder if command.folder is not None and os.path.isdir(command.folder) else None
        self._child = subprocess.Popen(
            (sys.executable, *command.arguments),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**(os.environ if command.is_trainer else child_environment()), **command.environment},
            cwd=folder,
            start_new_session=True,
        )
        self._on_event = on_event
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # it ended at once, as reported below
            self._child.stdin.write(f"{command.line}\n".encode())
            self._child.stdin.flush()
        threading.Thread(target=self._watch, name=f"process {self._child.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def signal(self, number: int) -> None:
        self._child.send_signal(number)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)

    def _watch(self) -> None:
        outputs = [(self._child.stdout, False), (self._child.stderr, True)]
        listeners = [threading.Thread(target=self._listen, args=output, daemon=True) for output in outputs if output[0] is not None]
        for listener in listeners:
            listener.start()
        code = self._child.wait()
        self._on_event(ProcessExit(code, in_words(code)))
        deadline = time.monotonic() + LAST_OUTPUT_S
        for listener in listeners:
            listener.join(max(0.0, deadline - time.monotonic()))
        self._on_event(OutputEnd())
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):
            self._child.stdin.close()

    def _listen(self, output: IO[bytes], is_error: bool) -> None:
        with output:
            while line := output.readline(LONGEST_LINE):
                self._on_event(OutputLine(line.decode(errors="replace").rstrip("\r\n"), is_error))


def in_words(code: int) -> str:
    """End of a process, in words."""
    if code >= 0:
        return f"ended with exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}"


def read_line() -> str:
    """In a process that was started: the line that tells it what to do. From then on it ends when its starter does."""
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            os._exit(LEFT_ALONE)
        data += more
    threading.Thread(target=_end_with_starter, name="starter", daemon=True).start()
    return data.decode().rstrip("\n")


def _end_with_starter() -> None:
    while os.read(0, 4096):
        pass
    os._exit(LEFT_ALONE)
