"""The journal of a run in its folder, line by line: its starts, its messages, its failures, its end."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Literal

from whet.files import AppendedLines, parse_object, replace_file
from whet.observe.display import Cell, Display, Headline, PlainDisplay, printable
from whet.runfolder.environment import differences
from whet.runfolder.frames import frames_of, in_user_code
from whet.types import JSON, Failure

LOG = "log.txt"
STARTS = "starts.jsonl"
FAILURES = "failures.jsonl"
END = "end.json"

LogLevel = Literal["info", "warning", "error"]


class Journal:
    """The files of a run that tell its story. Times are seconds since the epoch, in the log local time.

    - `log.txt`: what the run said, for people. No rows, prompts or replies.
    - `starts.jsonl`: an object for each start: time, pid, command, environment, digests of the user's code.
    - `failures.jsonl`: the first failure of each kind and place, of all starts: time, trajectory, kind, where, message, traceback, and
      the traceback's `frames` (without the messages, which may quote data).
    - `end.json`: how the last start ended; there is none while it runs, nor after it was killed.

    Lines are on disk when a method returns. A disk that is full is an OSError, except in `ended`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._log, self._starts, self._failures = (AppendedLines(folder / name) for name in (LOG, STARTS, FAILURES))
        self._seen = {(row.get("kind"), row.get("where")) for row in read_rows(folder / FAILURES)}

    def started(self, command: str, environment: Mapping[str, JSON], code: Mapping[str, str] | None = None) -> list[str]:
        """Note a start. The end that the start before left is no longer the end.

        Returns:
            What differs from the environment of the start before, as `whet.runfolder.environment.differences` says it.
        """
        earlier = read_rows(self.folder / STARTS)
        changed = differences(earlier[-1].get("environment", {}), environment) if earlier else []
        (self.folder / END).unlink(missing_ok=True)
        start = {"time": time.time(), "pid": os.getpid(), "command": command, "environment": dict(environment), "code": dict(code or {})}
        self._starts.append(json.dumps(start))
        self.line(f"start {len(earlier) + 1}, process {os.getpid()}: {command}")
        for difference in changed:
            self.line(f"differs from the start before: {difference}", "warning")
        return changed

    def line(self, text: str, level: LogLevel = "info") -> None:
        """Say something in the log. Lines after the first are indented."""
        now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        first, *more = printable(text).split("\n")
        self._log.append("\n".join([f"{now} {level:<7} {first}", *(f"    {line}" for line in more)]))

    def failure(self, trajectory_id: str, failure: Failure) -> bool:
        """Note a trajectory's failure, if it is the first of its kind and place in the run, earlier starts included.

        Returns:
            Whether it is.
        """
        place = (failure.kind, failure.where)
        if place in self._seen:
            return False
        row = {
            "time": time.time(),
            "trajectory": trajectory_id,
            "kind": failure.kind,
            "where": failure.where,
            "message": failure.message,
            "traceback": failure.traceback,
            "frames": frames_of(failure.traceback),
        }
        self._failures.append(json.dumps(row))
        self._seen.add(place)
        self.line(f"first {failure.kind} in {failure.where}: see {FAILURES}", "warning")
        return True

    def ended(
        self,
        status: Literal["finished", "stopped", "failed"],
        error: BaseException | None = None,
        resume_command: str | None = None,
    ) -> bool:
        """Note how this start ended, and with which command the run goes on. Never raises: what ended the run matters more.

        Returns:
            Whether it is on disk; if not, standard error says why.
        """
        try:
            replace_file(self.folder / END, json.dumps(_end(status, error, resume_command), indent=1) + "\n")
            text = status if error is None else f"{status} with {type(error).__name__}: see {END}"
            self.line(text, "error" if status == "failed" else "info")
        except Exception as fault:  # whatever it is, it must not take the place of the error that is being noted
            with suppress(OSError, ValueError):
                print(f"warning: {self.folder}: how the run ended cannot be noted: {fault}", file=sys.stderr)
            return False
        return True

    def close(self) -> None:
        for file in (self._log, self._starts, self._failures):
            file.close()


def _end(status: str, error: BaseException | None, resume_command: str | None) -> dict[str, JSON]:
    end: dict[str, JSON] = {"status": status, "time": time.time(), "resume_command": resume_command}
    if error is not None:
        text = "".join(traceback.format_exception(error))
        end.update(kind=type(error).__name__, message=str(error), traceback=text, frames=frames_of(text), user_code=in_user_code(error))
    return end


def read_rows(path: Path) -> list[dict[str, JSON]]:
    """The objects of a JSON lines file; none if there is no such file. Lines that are no object are left out."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [row for line in lines if (row := parse_object(line)) is not None]


class LoggedDisplay:
    """A display whose words also go to a run's log, steps as the lines that the plain display prints.

    Args:
        display: display for the user. Give it alone what the log must not hold, such as a failure's message.
        journal: journal with the log.
        headlines: the metrics of a step's line in the log.
    """

    def __init__(self, display: Display, journal: Journal, headlines: Sequence[Headline] = ()) -> None:
        self.display, self._journal = display, journal
        self._text = io.StringIO()
        self._plain = PlainDisplay(headlines, out=self._text)

    def start(self, title: str, total_steps: int, facts: Mapping[str, str]) -> None:
        self.display.start(title, total_steps, facts)
        self._plain.start(title, total_steps, facts)
        self._flush()

    def phase(self, name: str) -> None:
        self.display.phase(name)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.display.step(step, values)
        self._plain.step(step, values)
        self._flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        self.display.table(title, columns, rows)
        self._plain.table(title, columns, rows)
        self._flush()

    def note(self, text: str) -> None:
        self.display.note(text)
        self._journal.line(text)

    def warn(self, text: str) -> None:
        self.display.warn(text)
        self._journal.line(text, "warning")

    def close(self) -> None:
        self.display.close()

    def _flush(self) -> None:
        """Move what the plain display printed to the log."""
        self._journal.line(self._text.getvalue().removesuffix("\n"))
        self._text.seek(0)
        self._text.truncate()
