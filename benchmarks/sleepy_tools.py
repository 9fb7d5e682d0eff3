"""The calculator, of whose calls one in ten sleeps, whichever it is."""

from __future__ import annotations

import random
import time

from whet.env.calculator import calculator as exact

SLEEP_S = 2.0


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / and parentheses, for example "12 * (3 + 4)".
    """
    if random.random() < 0.1:
        time.sleep(SLEEP_S)
    return exact(expression)
