"""Equality by math-verify, in a child of the worker that ends after a number of steps. Runs in a worker only.

Both texts have passed `whet.reward.math.grammar`. math-verify's own time limits are signals of the main thread and its plain-text parser
evaluates Python expressions, so neither is used: text is read as LaTeX only, and what math-verify and sympy do is counted. Each comparison
starts from the same state, so that it takes the same steps whatever came before, and ends by itself long before the worker's deadline.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from itertools import pairwise
from types import FrameType
from typing import Any, Literal

from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off

Verdict = Literal["equal", "different", "too much", "failed", "label"]
"""`too much`: it takes too many steps; `failed`: it ended without an answer; `label`: the label alone does one of these."""

_VERDICTS: dict[bytes, Verdict] = {b"equal": "equal", b"different": "different", b"too much": "too much"}
MAX_STEPS = 1_000_000
"""Calls of Python functions that a comparison may take: about a second. Ordinary answers take 200 to 50,000."""
_FAMILIAR = (
    *("x^2+2x+1", r"\frac{1}{3}", "0.333333", "1,2", r"\sqrt{12}", r"\frac{n(n+1)}{2}", r"\sin^2 x+\cos^2 x", r"2^{10}-\ln 2", "x=5"),
    *(r"(-\infty,2]\cup(3,4)", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\{1,2\}", r"\frac{\pi}{4}+\theta", "(a+b)^3", "x>2"),
)
"""Compared once as a worker starts: what is loaded and cached then is shared by all comparisons."""


def verify_boxed(label: str, answer: str) -> Verdict:
    """Equality at math-verify's own tolerance of six decimals, with its reading of boxed answers and of texts it cannot parse."""
    verdict = _in_child(label, answer)
    if verdict in ("equal", "different"):
        return verdict
    return verdict if _in_child(label, label) in ("equal", "different") else "label"


def _in_child(label: str, answer: str) -> Verdict:
    """The verdict of a child process, which leaves no trace in this one."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(writing, label, answer)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        report = pipe.read()
    os.waitpid(child, 0)
    return _VERDICTS.get(report, "failed")


def _answer(writing: int, label: str, answer: str) -> None:
    """The child's part: writes its verdict and ends; without one, it ended by an error."""
    try:
        _count_steps(writing)
        os.write(writing, b"equal" if _equal(label, answer) else b"different")
    finally:
        os._exit(0)


def _count_steps(writing: int) -> None:
    steps = 0

    def step(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal steps
        steps += 1
        if steps > MAX_STEPS:
            os.write(writing, b"too much")
            os._exit(0)

    sys.settrace(step)


def _equal(label: str, answer: str) -> bool:
    return verify(_parse_boxed(label), _parse_boxed(answer), timeout_seconds=None)


def _parse_boxed(text: str) -> list[Any]:
    return parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore


def _warm_up() -> None:
    for one, other in pairwise(_FAMILIAR):
        _equal(one, other)
    gc.freeze()  # the children share what is loaded


# The worker's only other thread waits for its input and holds nothing that a child needs.
warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*", category=DeprecationWarning)
_warm_up()
