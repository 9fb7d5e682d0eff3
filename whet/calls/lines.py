"""Calls as lines of JSON over the pipes of a child process, one at a time, with a deadline. Nothing is
unpickled: the child runs code of others.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import IO

from whet.calls.messages import RemoteCall, RemoteFailure, RemoteResult, answer_of
from whet.calls.methods import Target, invoke

STDERR_TAIL_BYTES = 4096
Line = RemoteCall | RemoteResult | RemoteFailure


class AnswerTooLong(Exception):
    """A child's answer has more bytes than it may."""


def encode(message: Line) -> bytes:
    """A message as a line. Raises TypeError or ValueError if JSON cannot carry it."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    return json.dumps([type(message).__name__, values]).encode() + b"\n"


def decode(line: bytes) -> Line:
    """The message of a line."""
    name, values = json.loads(line)
    kind = {kind.__name__: kind for kind in (RemoteCall, RemoteResult, RemoteFailure)}[name]
    return kind(**values)


def answer(targets: Mapping[str, Target], call: RemoteCall, traceback_of: Callable[[BaseException], str]) -> bytes:
    """Make a call. Returns the line of its answer.

    Args:
        targets: objects by their names in calls.
        call: the call.
        traceback_of: text of an error's traceback.
    """
    try:
        return encode(RemoteResult(value=invoke(targets, call)[1]))
    except Exception as error:  # a user's function may raise anything; it is raised again where it was called
        return encode(answer_of(error, traceback_of))


class LinePipes:
    """The calling end: pipes of a child process. Used by one thread at a time.

    Args:
        child: with pipes for its input and output, and maybe for its errors.
        limit_bytes: longest answer.
    """

    def __init__(self, child: subprocess.Popen[bytes], limit_bytes: int) -> None:
        assert child.stdin and child.stdout
        self._stdin, self._stdout, self._stderr, self._limit_bytes = child.stdin, child.stdout, child.stderr, limit_bytes
        self.last_words = b""
        """End of what the child wrote to its errors."""
        for pipe in self._open():
            os.set_blocking(pipe.fileno(), False)

    def exchange(self, data: bytes, timeout_s: float) -> bytes:
        """Send lines, return the line that answers them.

        Raises:
            TimeoutError: if it does not come in time.
            EOFError: if the child ended.
            AnswerTooLong: if it has no end within the limit.
        """
        deadline = time.monotonic() + timeout_s
        rest, reply = memoryview(data), bytearray()
        with selectors.PollSelector() as selector:
            for pipe in self._open():
                selector.register(pipe, selectors.EVENT_WRITE if pipe is self._stdin else selectors.EVENT_READ)
            if not rest:
                selector.unregister(self._stdin)
            while not reply.endswith(b"\n"):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise TimeoutError(f"no answer within {timeout_s:g} s")
                ready = {key.fileobj for key, _ in selector.select(remaining)}
                if self._stderr in ready and not self.read_errors():
                    selector.unregister(self._stderr)  # pyright: ignore[reportArgumentType]
                if self._stdin in ready:
                    rest = rest[self._write(rest) :]
                    if not rest:
                        selector.unregister(self._stdin)
                if self._stdout in ready:
                    part = os.read(self._stdout.fileno(), 1 << 20)
                    if not part:
                        raise EOFError("it ended")
                    reply += part
                if len(reply) > self._limit_bytes:
                    raise AnswerTooLong(f"its answer is longer than {self._limit_bytes} bytes")
        return bytes(reply)

    def read_errors(self) -> bool:
        """Keep the end of the child's errors that are there; False at their end."""
        assert self._stderr is not None
        data = os.read(self._stderr.fileno(), 65536)
        self.last_words = (self.last_words + data)[-STDERR_TAIL_BYTES:]
        return bool(data)

    def close(self) -> None:
        for pipe in self._open():
            with suppress(OSError):
                pipe.close()

    def _open(self) -> list[IO[bytes]]:
        return [pipe for pipe in (self._stdin, self._stdout, self._stderr) if pipe is not None]

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._stdin.fileno(), data[:65536])
        except BrokenPipeError:
            raise EOFError("it ended") from None


def start_line_worker(
    module: str, cpu_limit_s: float, what: str, *, ready: bytes, environment: Mapping[str, str], limit_bytes: int, timeout_s: float
) -> tuple[subprocess.Popen[bytes], LinePipes]:
    """Start a process that answers line by line, and wait until it is ready. It ends with its input.

    Args:
        module: its `main` is called with `cpu_limit_s`, the processor time for one answer in seconds.
        cpu_limit_s: as above.
        what: what the process does, for an error.
        ready: its first line.
        environment: its environment variables.
        limit_bytes: longest answer.
        timeout_s: seconds for it to start.

    Raises:
        RuntimeError: it did not start.
    """
    root = str(Path(__file__).resolve().parents[2])
    begin = f"import sys; sys.path.append({root!r}); from {module} import main; main({cpu_limit_s!r})"
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", begin],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        bufsize=0,
        start_new_session=True,  # Ctrl-C does not reach it
    )
    pipes = LinePipes(process, limit_bytes)
    try:
        if pipes.exchange(b"", timeout_s) != ready:
            raise EOFError("it answered something else than that it is ready")
    except (TimeoutError, EOFError, AnswerTooLong) as error:
        process.kill()
        process.wait()
        pipes.close()
        raise RuntimeError(f"the process that {what} did not start: {error}") from error
    return process, pipes
