"""The display of a run, by its settings and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from whet.observe.display import Display, Headline, PlainDisplay, QuietDisplay
from whet.observe.notebook import in_notebook


def build_display(mode: Literal["auto", "rich", "plain", "none"], headlines: Sequence[Headline]) -> Display:
    """The display of a run. `auto` is the live panel where standard output is a terminal that can move its cursor, and a panel of
    its own in a notebook."""
    if mode == "none":
        return QuietDisplay()
    if mode == "plain":
        return PlainDisplay(headlines)
    if mode == "auto" and in_notebook():
        from whet.observe.notebook import NotebookDisplay

        return NotebookDisplay(headlines)
    from rich.console import Console

    from whet.observe.live import LiveDisplay

    console = Console()
    if mode == "auto" and (not console.is_terminal or console.is_dumb_terminal):
        return PlainDisplay(headlines)
    return LiveDisplay(headlines, console)
