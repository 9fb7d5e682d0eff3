"""Display of a run: a live panel on a terminal (`whet.observe.live`), a line per step elsewhere."""

from __future__ import annotations

import os
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TextIO

Cell = str | int | float | None
Clock = Callable[[], float]

WINDOW_STEPS = 20
"""Steps that the estimated time and the time split look back on."""
NO_PHASES = ("time/step_s", "time/engine_busy_s", "time/compile_s")
"""Times that are no phase of their own: the whole step, and times within phases that are counted
already."""
MIN_SHARE = 0.1
"""The smallest share of a step that the line of a step names."""


class Display(Protocol):
    """Display of a run for the person who watches it."""

    def start(self, title: str, total_steps: int, facts: Mapping[str, str]) -> None:
        """A part of the run begins: its name, its length, and what is good to know. The part before it has ended."""
        ...

    def phase(self, name: str) -> None:
        """Show the present activity."""
        ...

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """`step` steps are done (of `total_steps`); `values` are the last one's metrics, `time/<phase>_s` included."""
        ...

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Results. Floats are shown with four significant digits, None as nothing."""
        ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def close(self) -> None:
        """Leave the terminal as it was found. To be called however the run ends."""
        ...


@dataclass(frozen=True, slots=True)
class Headline:
    """A metric worth a place in every line: its key, its short name, and a format such as `.2f`."""

    key: str
    label: str
    format: str = ".3g"


class Pace:
    """Rate of steps, and the share of each phase in their time."""

    def __init__(self, total_steps: int, clock: Clock) -> None:
        self.total_steps, self._clock = total_steps, clock
        self.done = 0
        self._last = clock()
        self._seconds: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._phases: deque[dict[str, float]] = deque(maxlen=WINDOW_STEPS)

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Count a step; `done` steps are done now. Its time is that since the one before."""
        now = self._clock()
        self._seconds.append(now - self._last)
        self._phases.append(_phase_seconds(values))
        self._last, self.done = now, done

    @property
    def step_s(self) -> float:
        """Seconds of the last step."""
        return self._seconds[-1]

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the mean pace of the last steps; None before the first."""
        if not self._seconds:
            return None
        return max(0, self.total_steps - self.done) * sum(self._seconds) / len(self._seconds)

    def split(self, num_steps: int = WINDOW_STEPS) -> list[tuple[str, float]]:
        """Each phase's share of the time of the last `num_steps` steps, the largest first: that is the bottleneck."""
        seconds: dict[str, float] = {}
        for phases in list(self._phases)[-num_steps:]:
            for name, spent in phases.items():
                seconds[name] = seconds.get(name, 0.0) + spent
        whole = sum(seconds.values())
        shares = [(name, spent / whole) for name, spent in seconds.items() if whole > 0]
        return sorted(shares, key=lambda share: -share[1])


class QuietDisplay:
    """Nothing but warnings."""

    def __init__(self, err: TextIO | None = None) -> None:
        """`err`: where warnings go, standard error if left out."""
        self._err = err

    def start(self, title: str, total_steps: int, facts: Mapping[str, str]) -> None:
        pass

    def phase(self, name: str) -> None:
        pass

    def step(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        say(f"warning: {printable(text.rstrip())}", self._err or sys.stderr)

    def close(self) -> None:
        pass


class PlainDisplay(QuietDisplay):
    """One line per step, for logs and pipes; warnings go to standard error."""

    def __init__(
        self,
        headlines: Sequence[Headline],
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(err)
        self._headlines, self._out, self._clock = headlines, out, clock
        self._pace: Pace | None = None

    def start(self, title: str, total_steps: int, facts: Mapping[str, str]) -> None:
        self._pace = Pace(total_steps, self._clock)
        self._print(title)
        width = max((len(name) for name in facts), default=0)
        for name, fact in facts.items():
            self._print(f"  {name:<{width}}  {fact}")

    def step(self, step: int, values: Mapping[str, float]) -> None:
        pace = self._pace
        assert pace is not None, "start() comes before step()"
        pace.step(step, values)
        total = str(pace.total_steps)
        parts = [f"step {step:>{len(total)}}/{total}"]
        parts += [f"{label} {value}" for label, value in headline_values(self._headlines, values)]
        split = pace.split(num_steps=1)
        named = [share for share in split if share[1] >= MIN_SHARE] or split[:1]
        where = ", ".join(f"{name} {share:.0%}" for name, share in named)
        parts.append(seconds_text(pace.step_s) + (f" ({where})" if where else ""))
        parts.append(f"eta {duration_text(pace.eta_s or 0.0)}")
        self._print("  ".join(parts))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        check_table(title, columns, rows)
        cells = [[cell_text(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        numeric = [is_numeric(rows, i) for i in range(len(columns))]
        self._print(title)
        for row in (list(columns), ["-" * width for width in widths], *cells):
            aligned = zip(row, widths, numeric, strict=True)
            line = "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in aligned)
            self._print(f"  {line}".rstrip())

    def note(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        say(printable(text), self._out or sys.stdout)


def say(text: str, stream: TextIO) -> None:
    """Print a line. A reader that went away (`| head`, a `tee` that the same Ctrl-C ended) does not end
    the run: later lines are dropped. Letters that the stream's encoding lacks are spelled out."""
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError:
        say(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding), stream)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def headline_values(headlines: Sequence[Headline], values: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, formatted value) of the headlines that this step has."""
    return [(h.label, format(values[h.key], h.format)) for h in headlines if h.key in values]


def duration_text(seconds: float) -> str:
    """`42s`, `5m12s`, `2h05m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def seconds_text(seconds: float) -> str:
    """`0.25 s`, `1.1 s`, and longer ones as `duration_text`."""
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 59.95 else duration_text(seconds)


def printable(text: str) -> str:
    """Text without control characters, shown as `\\x1b`: what a model wrote must not steer the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def cell_text(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.4g}" if isinstance(cell, float) else printable(str(cell)).replace("\n", " ")


def is_numeric(rows: Sequence[Sequence[Cell]], column: int) -> bool:
    """True if a column holds numbers and no text, so that it is aligned right."""
    cells = [row[column] for row in rows if row[column] is not None]
    return bool(cells) and not any(isinstance(cell, str) for cell in cells)


def check_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
    for i, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(f"table {title!r}: row {i} has {len(row)} cells for {len(columns)} columns")


def _phase_seconds(values: Mapping[str, float]) -> dict[str, float]:
    """The top-level phases of `Phases.take()`, with `other`; nested ones are part of them, `step` is their sum."""
    keys = [key for key in values if key.startswith("time/") and key.endswith("_s") and key.count("/") == 1]
    return {key.removeprefix("time/").removesuffix("_s"): values[key] for key in keys if key not in NO_PHASES}
