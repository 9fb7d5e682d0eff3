"""The reward `verl_gsm8k`: the number after `####`, or the last one, is the label as text."""

from __future__ import annotations

import re
from typing import Literal

from whet.config import Config
from whet.reward.base import label_of
from whet.types import Rewards, Task

_NUMBER = re.compile(r"-?[0-9.,]+")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")

TAIL = 300
"""Characters, from the reply's end, that are read."""


class Gsm8kOptions(Config):
    """Options of the reward `verl_gsm8k`."""

    method: Literal["strict", "flexible"] = "strict"
    """strict: the last `#### ` followed by a number; flexible: the last run of digits, points and commas."""
    format_score: float = 0.0
    """Score of a reply that has an answer in the right form, but not the label."""


def extract_number(response: str, method: Literal["strict", "flexible"]) -> str | None:
    """The answer in the last 300 characters; None without one. Under `strict` its commas are left out."""
    tail = response[-TAIL:]
    if method == "strict":
        found = _STRICT.findall(tail)
        return found[-1].replace(",", "") if found else None
    found = _NUMBER.findall(tail)
    return next((number for number in reversed(found) if number != "."), found[0] if found else None)


def score_gsm8k(task: Task, response: str, options: Gsm8kOptions) -> Rewards:
    """1 if the answer is the label, as text: `3.50` is not `3.5`, `42.` is not `42`.

    The rule of verl's `gsm8k`. For numbers that are equal however written, use the reward `math` with `extract = "hash"`.
    """
    label = label_of(task, "verl_gsm8k")
    answer = extract_number(response, options.method)
    if answer is None:
        form = "no number after '#### '" if options.method == "strict" else "no number"
        return Rewards(0.0, detail=f"the reply has {form} in its last {TAIL} characters")
    if answer == label:
        return Rewards(1.0)
    return Rewards(options.format_score, detail=f"the answer {answer[:200]!r} is not the label {label[:200]!r}")
