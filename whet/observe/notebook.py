"""Display of a run in a notebook: a bar and a table of the newest steps, drawn again in place; messages as printed lines."""

from __future__ import annotations

import html
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from whet.observe.display import Cell, Headline, Pace, PlainDisplay, duration_text, headline_values, seconds_text

SHOWN_STEPS = 10
"""Steps in the table."""


def in_notebook() -> bool:
    """True in a process that a notebook's cells run in."""
    python = sys.modules.get("IPython")
    return python is not None and hasattr(python.get_ipython(), "kernel")


class NotebookDisplay(PlainDisplay):
    """A panel below the cell."""

    def __init__(self, headlines: Sequence[Headline]) -> None:
        super().__init__(headlines)
        self._steps: deque[tuple[int, Mapping[str, float]]] = deque(maxlen=SHOWN_STEPS)
        self._panel: Any = None
        self._phase = ""

    def start(self, title: str, total_steps: int, facts: Mapping[str, str]) -> None:
        super().start(title, total_steps, facts)
        from IPython.display import HTML, display  # pyright: ignore[reportMissingImports]

        self._steps.clear()
        self._pace = Pace(total_steps, time.monotonic)
        self._panel = display(HTML(self._html()), display_id=True)

    def phase(self, name: str) -> None:
        self._phase = name

    def step(self, step: int, values: Mapping[str, float]) -> None:
        assert self._pace is not None, "start() comes before step()"
        self._pace.step(step, values)
        self._steps.append((step, dict(values)))
        from IPython.display import HTML  # pyright: ignore[reportMissingImports]

        if self._panel is not None:
            self._panel.update(HTML(self._html()))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Results in one line: the panel has the rest."""
        cells = ", ".join(f"{row[0]} {row[1]:.4g}" for row in rows if len(row) == 2 and isinstance(row[1], int | float))
        self.note(f"{title}: {cells}" if cells else title)

    def _html(self) -> str:
        pace = self._pace
        assert pace is not None, "start() makes it"
        left = "" if pace.eta_s is None else f", {seconds_text(pace.step_s)} a step, {duration_text(pace.eta_s)} left"
        bar = f'<progress value="{pace.done}" max="{pace.total_steps}"></progress> {pace.done}/{pace.total_steps}{left}'
        labels = [headline.label for headline in self._headlines if any(headline.key in values for _, values in self._steps)]
        head = "".join(f"<th>{html.escape(label)}</th>" for label in ["step", *labels])
        lines: list[str] = []
        for step, values in self._steps:
            shown = dict(headline_values(self._headlines, values))
            cells = [str(step), *(shown.get(label, "") for label in labels)]
            lines.append(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>")
        return f"<div>{bar}</div><table><tr>{head}</tr>{''.join(lines)}</table>"
