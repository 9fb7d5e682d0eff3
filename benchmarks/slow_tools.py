"""The calculator, slow for a tenth of the expressions: always the same ones."""

from __future__ import annotations

import time
import zlib

from whet.env.calculator import calculator as exact

SLEEP_S = 0.5


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: numbers with + - * / and parentheses, for example "12 * (3 + 4)".
    """
    if zlib.crc32(expression.encode()) % 10 == 0:
        time.sleep(SLEEP_S)
    return exact(expression)
