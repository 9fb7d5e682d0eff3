"""Files about failures in the middle of a run, written when they happen: `failures/<n>_<who>.txt`."""

from __future__ import annotations

import faulthandler
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path

FOLDER = "failures"


class FailureFiles:
    """Writes a file for each failure, and says one line of it.

    Args:
        folder: folder of the run.
        phase: present phase of the run.
        tell: shows a line to the person who started the run.
    """

    def __init__(self, folder: Path, phase: Callable[[], str], tell: Callable[[str], None]) -> None:
        self._folder, self._phase, self._tell = folder / FOLDER, phase, tell

    def write(self, who: str, cause: str, then: str, in_flight: Sequence[str], stacks: Mapping[str, str]) -> None:
        """Write a failure to a file. If that fails, on a full disk for example, the message says so,
        and the run continues.

        Args:
            who: the part that failed.
            cause: the reason, in one line or more.
            then: the reaction to it.
            in_flight: its unfinished work, a line each.
            stacks: stacks of other processes, by the process's name; this process's are added.
        """
        first = cause.partition("\n")[0]
        try:
            kept = f"see {self._write(who, cause, then, in_flight, stacks)}"
        except OSError as fault:
            kept = f"what is known of it cannot be kept: {fault}"
        self._tell(f"{first}; {then}; {kept}")

    def _write(self, who: str, cause: str, then: str, in_flight: Sequence[str], stacks: Mapping[str, str]) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "_", who)
        path = next(path for n in count(1) if not (path := self._folder / f"{n}_{name}.txt").exists())
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        parts = [f"{now} {who}", cause, f"then: {then}", f"phase: {self._phase() or 'none'}"]
        parts.append("\n".join(["in flight:", *(f"    {line}" for line in in_flight)]) if in_flight else "in flight: nothing")
        parts += [f"stacks of {process}:\n{text}" for process, text in stacks.items()]
        with open(path, "w") as file:
            file.write("\n\n".join([*parts, "stacks of this process:\n"]))
            file.flush()
            with suppress(OSError, ValueError):
                faulthandler.dump_traceback(file, all_threads=True)
        return path
