"""The tools that the model may call: functions with types and a docstring."""

import re


def calculate(expression: str) -> str:
    """Add, subtract or multiply two whole numbers.

    Args:
        expression: for example 12*7.
    """
    found = re.fullmatch(r"\s*(-?\d+)\s*([-+*])\s*(-?\d+)\s*", expression)
    if not found:
        raise ValueError("write two whole numbers with -, + or * between them")  # the model reads this
    a, b = int(found[1]), int(found[3])
    return str({"-": a - b, "+": a + b, "*": a * b}[found[2]])
