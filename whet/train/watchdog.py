"""Watchdog of exchanges of a job's processes that expire: each process reports its place, and the first
to notice writes the reports down and names the processes that did not come.

The processes speak by the store over which the job met, which needs none of the process groups, from
threads of their own. The number of exchanges that each has started in each of its groups shows who waits:
a process waits if another of its group has started fewer; the others did not come.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.distributed_c10d import (
    _get_default_store,  # pyright: ignore[reportPrivateUsage]
    _set_pg_timeout,  # pyright: ignore[reportPrivateUsage]
    _world,  # pyright: ignore[reportPrivateUsage]
)

from whet.observe.display import say
from whet.runfolder.failures import FailureFiles
from whet.runfolder.stacks import SAY_STACKS, TIMEOUT_S, own_stacks, spied
from whet.types import RunFailed

POLL_S = 1.0
"""Seconds between two looks at whether an exchange has expired."""
ANSWER_S = 5.0
"""For the others to say where they are."""
BEATS = 10
"""Number of signs of life by the controller within the time after which the others give it up."""
LINGER_S = 10.0
"""Seconds that a process with nothing to add stays for the controller to tell how the run ended."""
EXPIRED = re.compile(r"timed out|timeout", re.IGNORECASE)
"""In torch's words for an exchange that another process did not come to in time."""
BROKEN = re.compile(r"gloo|nccl|connection|socket|broken pipe", re.IGNORECASE)
"""In its words for one that broke off, because another process saw that first, or is gone."""


class RankHung(RunFailed):
    """A process of the job did not come to an exchange in time; the text names it and says where to read on."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The controller's knowledge of the run."""

    phase: str = ""
    in_flight: tuple[str, ...] = ()
    """Trajectories being played, a line each."""


@dataclass(frozen=True, slots=True)
class ProcessAddress:
    """Address of a process for people."""

    host: str
    pid: int
    descriptor: int
    """Descriptor of the open file into which the process writes its stacks on `SAY_STACKS`."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True, slots=True)
class RankReport:
    """A process's report of itself."""

    doing: str
    phase: str
    in_flight: list[str]
    exchanges: dict[str, int]
    """Number of exchanges that the process has started in each of its groups."""
    stacks: str


class Watchdog:
    """One process's part; every process of a job makes one, once the default process group is there.

    Args:
        folder: the run's, which all processes see.
        timeout_s: seconds for every exchange but the wait for the controller's next call.
    """

    def __init__(self, folder: Path, timeout_s: float) -> None:
        self._folder, self._timeout_s = folder, timeout_s
        self._rank, self._count = dist.get_rank(), dist.get_world_size()
        self._store: Any = PrefixStore("watchdog", cast(Any, _get_default_store()).clone())
        self._status: Callable[[], RunStatus] = RunStatus
        self._doing: list[tuple[str, float]] = []
        self._stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115
        faulthandler.register(SAY_STACKS, file=self._stacks, all_threads=True)
        place = ProcessAddress(socket.gethostname(), os.getpid(), self._stacks.fileno())
        self._store.set(f"place/{self._rank}", json.dumps(asdict(place)))
        self._closed = threading.Event()
        self._listening = threading.Thread(target=self._listen, name="watchdog", daemon=True)
        self._listening.start()
        self.cause: str | None = None
        """Why no further exchange can succeed."""

    def report_status(self, source: Callable[[], RunStatus]) -> None:
        """Set the source of the facts about the run; it is called on another thread."""
        self._status = source

    def set_deadlines(self, calls: dist.ProcessGroup) -> None:
        """Give every group that there is the deadline; over which calls come, only the controller has it: the others may wait long."""
        for group in _world.pg_map:
            if group is not calls or self._rank == 0:
                _set_pg_timeout(timedelta(seconds=self._timeout_s), group)

    def check(self) -> None:
        """Report an expired exchange.

        Raises:
            RankHung: if an exchange has expired.
        """
        if self.cause is not None:
            raise RankHung(self.cause)

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Context of an action that takes exchanges.

        Raises:
            RankHung: if one expired, here or elsewhere, in place of torch's error.
        """
        entry = (what, time.monotonic())
        self._doing.append(entry)
        try:
            yield
        except RuntimeError as error:
            self.cause = self.cause or self._cause_of(error)
            if self.cause is None:
                raise
            raise RankHung(self.cause) from error
        finally:
            self._doing.remove(entry)  # another thread may do something, too

    def close(self) -> None:
        """The job ends."""
        self._closed.set()
        self._listening.join(2 * POLL_S)  # not for ever: where the store's machine is gone, it waits for that one's answer
        faulthandler.unregister(SAY_STACKS)
        self._stacks.close()

    def _cause_of(self, error: RuntimeError) -> str | None:
        """Why an exchange failed, if that is since one expired. Waits until it is written down."""
        if isinstance(error, RankHung):
            return str(error)
        if EXPIRED.search(str(error)) and BROKEN.search(str(error)):
            first = int(self._store.compare_set("expired", "", str(self._rank)))
            if first == self._rank:
                hung, cause = self._write_down("".join(traceback.format_exception(error)))
                if self._rank and 0 not in hung:
                    time.sleep(LINGER_S)
                return cause
        elif not BROKEN.search(str(error)) or not self._comes("expired", 2 * POLL_S):
            return None
        if not self._comes("cause", 2 * ANSWER_S + self._count * 2 * TIMEOUT_S):
            return f"an exchange between the processes expired, and who noticed it did not say more: {error}"
        cause = self._store.get("cause").decode()
        if self._rank:
            time.sleep(LINGER_S)
        return cause

    def _comes(self, key: str, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _listen(self) -> None:
        """Answer an expired exchange; and see that the controller lives, for whose next call no exchange has a deadline."""
        heard, since = b"", time.monotonic()
        with suppress(RuntimeError):  # the store has ended with who started the job
            while not self._closed.wait(POLL_S):
                if self._store.check(["expired"]):
                    self._store.set(f"answer/{self._rank}", json.dumps(asdict(self._answer())))
                    return
                now = time.monotonic()
                if self._rank == 0:
                    if now - since > self._timeout_s / BEATS:
                        self._store.set("beat", str(now))
                        since = now
                elif self._store.check(["beat"]) and (beat := self._store.get("beat")) != heard:
                    heard, since = beat, now
                elif now - since > self._timeout_s:
                    self._end_without_controller()

    def _end_without_controller(self) -> None:
        """The controller shows no life. The thread that waits for its call cannot be woken, so this one ends the process."""
        if int(self._store.compare_set("expired", "", str(self._rank))) == self._rank:
            self._store.set(f"answer/{self._rank}", json.dumps(asdict(self._answer())))
            say(f"error: {self._write_down()[1]}", sys.stderr)
            os._exit(2)

    def _answer(self) -> RankReport:
        now, doing = self._status(), "waits for the controller's next call" if self._rank else "between calls"
        with suppress(IndexError):  # it may end just now
            what, since = self._doing[-1]
            doing = f"{what}, for {time.monotonic() - since:.0f} s"
        return RankReport(doing, now.phase, list(now.in_flight), exchanges(), own_stacks())

    def _write_down(self, expired: str = "") -> tuple[list[int], str]:
        """Collect what all say, and keep it, with the traceback of what expired here. Returns who did not come, and the cause."""
        deadline = time.monotonic() + ANSWER_S
        answers: dict[int, RankReport] = {}
        while len(answers) < self._count and time.monotonic() < deadline:
            for rank in range(self._count):
                if rank not in answers and self._store.check([f"answer/{rank}"]):
                    answers[rank] = RankReport(**json.loads(self._store.get(f"answer/{rank}")))
            time.sleep(0.1)
        places = [ProcessAddress(**json.loads(self._store.get(f"place/{rank}"))) for rank in range(self._count)]
        silent = [rank for rank in range(self._count) if rank not in answers]
        hung = silent or late(answers)
        stacks: dict[str, str] = {}
        for rank, place in enumerate(places):
            answer = answers.get(rank)
            text = self._read_from(place) if answer is None else f"{answer.doing}\n{answer.stacks}"
            if rank == self._rank:
                text += expired
            stacks[f"rank {rank} ({place})"] = text
        cause = self._words(hung, silent, places)
        unknown = "unknown, rank 0 does not say"
        controller = answers.get(0) or RankReport("", unknown, [unknown], {}, "")
        messages: list[str] = []
        files = FailureFiles(self._folder, lambda: controller.phase, messages.append)
        files.write(_named(hung) or "ranks", cause, "the run ends", controller.in_flight, stacks)
        self._store.set("cause", messages[0])
        return hung, messages[0]

    def _words(self, hung: list[int], silent: list[int], places: list[ProcessAddress]) -> str:
        within = f"within {self._timeout_s:g} s (train.exchange_timeout_s)"
        if not hung:
            return f"an exchange was not over {within}, though all {self._count} processes are in one: they wait for one another"
        where = ", ".join(str(places[rank]) for rank in hung)
        how = "it does not answer" if silent else "it hangs, or computes for longer than that"
        return f"{_named(hung)} of {self._count} ({where}) did not come to an exchange {within}: {how}"

    def _read_from(self, place: ProcessAddress) -> str:
        """The stacks of a process whose threads do not answer: what its signal handler writes, or what py-spy sees."""
        if place.host != socket.gethostname():
            return "it does not answer, and is on another machine"
        file = Path(f"/proc/{place.pid}/fd/{place.descriptor}")
        try:
            os.kill(place.pid, SAY_STACKS)
            deadline = time.monotonic() + TIMEOUT_S
            while time.monotonic() < deadline:
                if text := file.read_text():
                    time.sleep(0.2)  # it may still be writing
                    return file.read_text() or text
                time.sleep(0.1)
        except OSError as error:
            return f"it cannot be asked: {error.strerror}"
        return spied(place.pid) or "it does not answer a signal either (it may be stopped), and py-spy is not installed or may not look"


def late(answers: Mapping[int, RankReport]) -> list[int]:
    """Ranks that wait for no other: every exchange that they started was started by all others of the
    group, too."""
    fewest: dict[str, int] = {}
    for answer in answers.values():
        for name, begun in answer.exchanges.items():
            fewest[name] = min(begun, fewest.get(name, begun))
    return [rank for rank, answer in answers.items() if all(begun == fewest[name] for name, begun in answer.exchanges.items())]


def exchanges() -> dict[str, int]:
    """Number of exchanges that this process has started in each of its groups."""
    out: dict[str, int] = {}
    for group in list(_world.pg_map):
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            out[f"{group.group_name} of {ranks}"] = _num_begun(group)
    return out


def _num_begun(group: dist.ProcessGroup) -> int:
    """Number of exchanges started in a group, in the CPU's memory and a device's: each has a backend that
    counts its own."""
    backends = {id(backend): backend for backend in (group._get_backend(kind) for kind in group._device_types)}
    return sum(backend._get_sequence_number_for_group() for backend in backends.values())  # pyright: ignore


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if ranks else ""
