"""A pool of worker processes that can be killed: what runs in one cannot hang, crash or bloat the trainer."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from whet.calls import keeper
from whet.calls.lines import AnswerTooLong, LinePipes, decode, encode
from whet.calls.messages import RemoteCall, RemoteFailure, RemoteResult
from whet.reward.base import RewardError, RewardTimeout
from whet.runfolder.child_environment import child_environment
from whet.types import JSON

WORKER = "worker"
"""Target of the pool's calls."""
START_TIMEOUT_S = 60.0
"""For a new worker to start and import what it needs; no call's deadline pays for that."""
MAX_REPLY_BYTES = 2**20
SWEEP_TIMEOUT_S = keeper.END_S + 5.0
"""For a keeper to end what a call left behind."""
DEATH_S = 2.0
"""For a worker whose pipe has closed to be gone."""


class WorkerPool:
    """Runs functions, named by import reference, in child processes; JSON goes in and JSON comes out.

    Processes start with the first call that needs them. Calls beyond `workers` queue up; each one's `timeout_s`
    starts when a worker takes it. A call that expires gets its worker killed, and all that the worker started; the
    next call starts a new one. What a call started and left behind ends with it, whatever session it is in
    (`whet.calls.keeper`). Safe to use from several tasks and from several event loops.
    """

    def __init__(
        self, workers: int, timeout_s: float, memory_mb: int = 0, preload: Sequence[str] = (), environment: Sequence[str] = ()
    ) -> None:
        """`memory_mb`: address space of each worker (Linux; 0: no limit). `preload`: what it imports as it starts. `environment`: names of
        variables that it gets besides those of every process that whet starts.

        Raises:
            ValueError: such a variable is not set.
        """
        if workers < 1:
            raise ValueError(f"a worker pool needs at least 1 worker, not {workers}")
        self.timeout_s, self.num_workers = timeout_s, workers
        self._environment = child_environment({"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0"}, environment)
        settings = {"sys_path": sys.path[:], "memory_mb": memory_mb, "preload": list(preload)}
        self._start = encode(RemoteCall(WORKER, "start", kwargs=settings, timeout_s=START_TIMEOUT_S))
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="whet-reward")
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    async def call(self, function: str, arguments: Mapping[str, JSON], what: str) -> JSON:
        """`function(**arguments)` in a worker. `what` names the call in errors.

        Raises RewardTimeout when it exceeds `timeout_s`, RewardError when it raises or its worker dies.
        """
        try:
            line = encode(RemoteCall(WORKER, "run", (function, dict(arguments)), timeout_s=self.timeout_s))
        except (TypeError, ValueError) as error:
            raise RewardError(f"{what}: its arguments cannot be sent to a worker as JSON: {error}") from error
        if self._closed:
            raise RewardError(f"{what}: the pool is closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._run, line, what)

    @property
    def pids(self) -> list[int]:
        """The processes alive now."""
        with self._lock:
            return sorted(worker.pid for worker in self._all)

    def close(self) -> None:
        """Kill and reap every worker; calls in flight or queued raise RewardError. Idempotent."""
        with self._lock:
            self._closed = True
            for worker in self._all:
                worker.kill()
        self._threads.shutdown(wait=True)
        for worker in list(self._all):
            self._discard(worker)

    def _run(self, line: bytes, what: str) -> JSON:
        worker = self._take(what)
        try:
            reply = worker.exchange(line, self.timeout_s)
        except TimeoutError as error:
            self._discard(worker)
            raise RewardTimeout(f"{what} took longer than {self.timeout_s:g} s (reward.timeout_s); its worker was killed") from error
        except _WorkerDied as error:
            self._discard(worker)
            raise RewardError(f"{what}: {'the pool was closed' if self._closed else error}") from error
        if worker.asks(b"s"):
            self._give_back(worker)
        else:  # something that the call started cannot be ended, or the worker's keeper is gone
            self._discard(worker)
        return _value(reply, what)

    def _take(self, what: str) -> _Worker:
        with self._lock:
            if self._closed:
                raise RewardError(f"{what}: the pool is closed")
            if self._idle:
                return self._idle.pop()
            worker = _Worker(self._environment)
            self._all.add(worker)
        try:
            _value(worker.exchange(self._start, START_TIMEOUT_S), "starting a reward worker")
            worker.asks(b"b")
        except (TimeoutError, _WorkerDied, RewardError) as error:
            self._discard(worker)
            if isinstance(error, RewardError):
                raise
            kind = RewardTimeout if isinstance(error, TimeoutError) else RewardError
            raise kind(f"{what}: its worker did not start: {error}") from error
        return worker

    def _give_back(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def _discard(self, worker: _Worker) -> None:
        worker.close()
        with self._lock:
            self._all.discard(worker)


class _WorkerDied(Exception):
    """A worker ended, or broke the protocol, before it answered."""


class _Worker:
    """One child process under its keeper, with its three pipes. Used by one thread at a time, except for `kill`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(SWEEP_TIMEOUT_S)
        command = [sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno()), sys.executable, "-m", "whet.reward.worker"]
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                bufsize=0,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C does not reach it
            )
        self._pipes = LinePipes(self._process, MAX_REPLY_BYTES)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exchange(self, line: bytes, timeout_s: float) -> bytes:
        """Send one line, return the line that answers it. Raises TimeoutError or `_WorkerDied`."""
        try:
            return self._pipes.exchange(line, timeout_s)
        except EOFError:
            raise self._death() from None
        except AnswerTooLong as error:
            raise _WorkerDied(f"{error}; the worker was killed") from None

    def asks(self, what: bytes) -> bool:
        """Have its keeper do something (`whet.calls.keeper`). Returns whether it did."""
        try:
            self._control.sendall(what)
            return self._control.recv(1) == keeper.SWEPT
        except OSError:
            return False

    def kill(self) -> None:
        """Have its keeper end it and all that it started; does not wait."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end()
        self._pipes.close()
        self._control.close()

    def _end(self) -> int:
        """End it; returns its exit status."""
        self.kill()
        try:
            return self._process.wait(SWEEP_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # somebody stopped the keeper: its worker dies with it
            self._process.kill()
            return self._process.wait()

    def _death(self) -> _WorkerDied:
        with suppress(subprocess.TimeoutExpired):  # it may have closed its pipe alone
            self._process.wait(DEATH_S)
        code = self._end()
        try:
            while self._pipes.read_errors():
                pass
        except BlockingIOError:
            pass  # something the function started still holds the pipe; what is there has been read
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = self._pipes.last_words.decode(errors="replace").strip()
        return _WorkerDied(f"its worker died ({how}); " + (f"its last output: {words}" if words else "it printed nothing"))


def _value(line: bytes, what: str) -> JSON:
    answer = decode(line)
    if isinstance(answer, RemoteResult):
        return answer.value
    assert isinstance(answer, RemoteFailure)
    error = RewardError(f"{what}: {answer.kind}: {answer.message}{answer.place}")
    if answer.traceback:
        error.add_note(answer.traceback)
    raise error
