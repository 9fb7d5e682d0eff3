r"""The answer comparison of the MATH data set (Hendrycks et al., arXiv 2103.03874): two texts are equal once spelled alike.

Nothing is computed: `\frac12` is `1/2` because both are respelled, `2/4` is not. Several published graders build on these rules, each with
small additions, so the parts that differ are arguments here.
"""

from __future__ import annotations

import re

from whet.config import Config
from whet.reward.base import label_of
from whet.types import Rewards, Task

MAX_ANSWER = 2000
"""Characters of an answer that is compared; a longer one scores 0 and says so."""

_TEXT = re.compile(r"\\text\{(.+?)\}")
_BRACE = re.compile(r"[{}]")
_ROOT = "\\sqrt"
_FRACTION = "\\frac"
_RATIO = re.compile(r"(-?(?:0|[1-9]\d*))/(-?(?:0|[1-9]\d*))", re.ASCII)
_DROPPED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")
_UNIT = "\\text{ "


def last_box(text: str, *, spaced: bool = False) -> str | None:
    r"""Content of the last `\boxed{...}`, with braces counted; None without one, and if it is never
    closed.

    `spaced`: if there is a `\boxed 5`, it counts instead, up to the next dollar sign.
    """
    if spaced and "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    depth = 0
    for match in _BRACE.finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0 and match.group() == "}":
            box = text[start : match.end()]
            return box[len("\\boxed{") : -1] if box.startswith("\\boxed{") else None
    return None


def unwrap_text(text: str) -> str:
    r"""`\text{...}` around the whole is left out."""
    match = _TEXT.fullmatch(text)
    return match.group(1) if match else text


def respell(text: str) -> str:
    r"""One spelling for the answers that MATH writes in several.

    Line breaks, `\!`, `\left`, `\right`, degrees, `\$`, `\%`, a unit in `\text{ ...}` and spaces go; `\dfrac` and `\tfrac` are `\frac`;
    `.5` is `0.5`; a short left side (`x=`) goes; `\sqrt3` is `\sqrt{3}`, `\frac12` is `\frac{1}{2}`, `0.5` is a half, and `a/b` of whole
    numbers is a fraction.

    Raises:
        ValueError: the text is not of the form that a rule expects (two units, a `\sqrt` or `\frac` of nothing).
    """
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac")):
        text = text.replace(old, new)
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    if text.count(_UNIT) > 1:
        raise ValueError("it has two units")
    text = text.partition(_UNIT)[0].replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not text:
        return text
    text = "0" + text if text[0] == "." else text
    left, equals, right = text.partition("=")
    if equals and "=" not in right and len(left) <= 2:
        text = right
    text = _brace_fractions(_brace_roots(text).replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    ratio = _RATIO.fullmatch(text)
    return f"\\frac{{{ratio.group(1)}}}{{{ratio.group(2)}}}" if ratio else text


def equivalent(answer: str, label: str) -> bool:
    """True if two answers are spelled alike; texts that cannot be respelled are compared unchanged."""
    try:
        return respell(answer) == respell(label)
    except ValueError:
        return answer == label


class HendrycksOptions(Config):
    """The reward `hendrycks_math` has no options."""


def score_hendrycks(task: Task, response: str, options: HendrycksOptions) -> Rewards:
    r"""1 if the last `\boxed{...}` (or `\boxed 5`) is the label in the spelling of MATH, else 0.

    The rule of verl's `math_reward` (the MATH score of lm-evaluation-harness). The label is the bare answer.
    """
    label = label_of(task, "hendrycks_math")
    answer = last_box(response, spaced=True)
    if answer is None:
        return Rewards(0.0, detail="the reply has no closed \\boxed{}")
    return verdict(equivalent(answer, label) if len(answer) <= MAX_ANSWER else None, answer, label)


def verdict(equal: bool | None, answer: str, label: str) -> Rewards:
    """A score with its reason; None: the answer is too long to be compared."""
    if equal is None:
        return Rewards(0.0, detail=f"the answer is {len(answer)} characters long; at most {MAX_ANSWER} are compared")
    if equal:
        return Rewards(1.0)
    return Rewards(0.0, detail=f"the answer {answer[:200]!r} is not the label {label[:200]!r}")


def _brace_roots(text: str) -> str:
    first, *rest = text.split(_ROOT)
    if "" in rest:
        raise ValueError("it ends in a \\sqrt of nothing")
    return first + "".join(_ROOT + (part if part[0] == "{" else f"{{{part[0]}}}{part[1:]}") for part in rest)


def _brace_fractions(text: str) -> str:
    first, *rest = text.split(_FRACTION)
    braced = first
    for part in rest:
        if not part:
            raise ValueError("it ends in a \\frac of nothing")
        if part[0] == "{":
            braced += _FRACTION + part
        elif len(part) < 2:
            return text
        else:
            under = part[1] if part[1] == "{" else f"{{{part[1]}}}"
            braced += f"{_FRACTION}{{{part[0]}}}{under}{part[2:]}"
    return braced
