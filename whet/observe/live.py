"""The live panel: progress, phase, where the time goes, and the headline metrics, redrawn in place on a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from whet.observe.display import (
    Cell,
    Clock,
    Headline,
    Pace,
    cell_text,
    check_table,
    duration_text,
    headline_values,
    is_numeric,
    printable,
    seconds_text,
)

BAR_WIDTH = 16
GAP = "  "
"""Text between two pairs of a line."""


class LiveDisplay:
    """One panel for each part of a run; notes, warnings and tables scroll by above it."""

    def __init__(self, headlines: Sequence[Headline], console: Console, clock: Clock = time.monotonic) -> None:
        self._headlines, self._console, self._clock = headlines, console, clock
        # The panel is also drawn from rich's own thread, so that its clocks go on while a step takes long.
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._title, self._facts = "", Pairs(())
        self._pace = Pace(0, clock)
        self._began = self._phase_began = clock()
        self._phase = ""
        self._values: Mapping[str, float] = {}

    def start(self, title: str, total_steps: int, facts: Mapping[str, str]) -> None:
        self.close()
        self._title, self._facts = title, Pairs(facts.items())
        self._pace, self._began, self._values = Pace(total_steps, self._clock), self._clock(), {}
        self._live = Live(console=self._console, get_renderable=self.render, refresh_per_second=4)
        self._live.start()

    def phase(self, name: str) -> None:
        with self._lock:
            self._phase, self._phase_began = name, self._clock()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        assert self._live is not None, "start() comes before step()"
        with self._lock:
            self._pace.step(step, values)
            self._values = dict(values)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        check_table(title, columns, rows)
        table = Table(title=Text(printable(title), style="bold"), title_justify="left")
        for i, column in enumerate(columns):
            table.add_column(Text(printable(column)), justify="right" if is_numeric(rows, i) else "left")
        for row in rows:
            table.add_row(*(Text(cell_text(cell)) for cell in row))
        self._console.print(table)

    def note(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def warn(self, text: str) -> None:
        self._console.print(Text(f"warning: {printable(text.rstrip())}", style="yellow"))

    def close(self) -> None:
        """End the panel; its last state stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def render(self) -> RenderableType:
        """The panel as things stand now."""
        with self._lock:
            rows = {
                "run": self._facts,
                "step": self._progress(),
                "phase": self._phase_text(),
                "time": self._split(),
                "metrics": Pairs(headline_values(self._headlines, self._values)),
            }
            title = Text(printable(self._title), style="bold")
        grid = Table.grid(padding=(0, 2))
        for label, content in rows.items():
            if content:
                grid.add_row(Text(label, style="dim"), content)
        return Panel(grid, title=title, title_align="left")

    def _progress(self) -> RenderableType:
        pace = self._pace
        line = Text(f"{pace.done}/{pace.total_steps}  elapsed {duration_text(self._clock() - self._began)}")
        if pace.eta_s is not None:
            line.append(f"  {seconds_text(pace.step_s)} a step  eta {duration_text(pace.eta_s)}")
        row = Table.grid(padding=(0, 2))
        row.add_row(ProgressBar(total=max(1, pace.total_steps), completed=pace.done, width=BAR_WIDTH), line)
        return row

    def _phase_text(self) -> Text:
        if not self._phase:
            return Text()
        return Text(f"{printable(self._phase)} ({duration_text(self._clock() - self._phase_began)})")

    def _split(self) -> Pairs:
        split = self._pace.split()
        pairs = Pairs((name, f"{share:.0%}") for name, share in split)
        if split:
            pairs.parts.append(Text(f"bottleneck: {split[0][0]}", style="bold yellow"))
        return pairs


class Pairs:
    """`name value  name value` in as many lines as it takes; a line breaks between pairs only, unless one alone is too long."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self.parts = [Text.assemble((printable(name), "dim"), " ", printable(value)) for name, value in pairs]

    def __bool__(self) -> bool:
        return bool(self.parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text()
        for part in self.parts:
            if line and line.cell_len + len(GAP) + part.cell_len > options.max_width:
                yield line
                line = Text()
            line = Text.assemble(line, GAP, part) if line else part
        yield line

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        lengths = [part.cell_len for part in self.parts]
        return Measurement(max(lengths, default=0), sum(lengths) + len(GAP) * max(len(lengths) - 1, 0)).with_maximum(options.max_width)
