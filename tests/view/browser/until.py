"""Waiting for what a page says, without a string that the page would have to evaluate: its policy forbids that."""

from __future__ import annotations

import time

WAIT_S = 20


def until(page, expression: str, argument=None) -> None:
    """Return once a JavaScript expression (or function of the argument) is true on the page."""
    end = time.monotonic() + WAIT_S
    while not page.evaluate(expression, argument):
        assert time.monotonic() < end, f"still false after {WAIT_S} s: {expression}"
        page.wait_for_timeout(50)
