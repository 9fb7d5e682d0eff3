"""Symbolic equality through math-verify. Runs in a worker only: its cost has no bound of its own.

Both texts have passed `whet.reward.grammar`. math-verify's own time limits are signals of the main thread and its
plain-text parser evaluates Python expressions, so neither is used: the worker is killed at its deadline, and text is
read as LaTeX only.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Literal

from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

Verdict = Literal["equal", "different", "label", "answer"]
"""`label`, `answer`: which of the two could not be read."""

DECIMALS = 12
"""To which decimals are compared with irrational numbers, where no exact comparison exists."""


def compare(label: str, answer: str) -> Verdict:
    label_forms, answer_forms = _parse(label), _parse(answer)
    if not label_forms:
        return "label"
    if not answer_forms:
        return "answer"
    equal = verify(label_forms, answer_forms, float_rounding=DECIMALS, timeout_seconds=None)
    return "equal" if equal else "different"


def readable(labels: list[str]) -> list[bool]:
    """Which of the labels can be read."""
    return [bool(_parse(label)) for label in labels]


def verify_boxed(label: str, answer: str) -> bool:
    """Equality at math-verify's own tolerance of six decimals, with its reading of boxed answers and of texts it cannot parse."""
    label_forms, answer_forms = (_parse_boxed(text) for text in (label, answer))
    return verify(label_forms, answer_forms, timeout_seconds=None)


def close_enough(label: str, answer: str, tolerance: float) -> bool:
    """Symbolic equality, or values within a relative tolerance."""
    label_forms, answer_forms = _parse(label), _parse(answer)
    if not label_forms or not answer_forms:
        return False
    if verify(label_forms, answer_forms, float_rounding=DECIMALS, timeout_seconds=None):
        return True
    try:
        return math.isclose(float(label_forms[0]), float(answer_forms[0]), rel_tol=tolerance)
    except (TypeError, AttributeError):  # a set, a relation, a formula with symbols
        return False


def _parse_boxed(text: str) -> list[Any]:
    return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore


def _parse(text: str) -> list[Any]:
    config = LatexExtractionConfig()
    return parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)  # pyright: ignore
