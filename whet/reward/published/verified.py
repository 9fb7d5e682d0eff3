r"""The reward `math_verify`: the answer equals the label as math-verify sees it, at that library's own tolerance."""

from __future__ import annotations

import re

from whet.config import Config
from whet.reward.base import RewardTimeout, bad_row, call_name, label_of
from whet.reward.math.extract import MAX_READ, last_boxed, last_number, stated_answer
from whet.reward.math.grammar import Refused, check_formula
from whet.reward.pool import WorkerPool
from whet.reward.published.hendrycks import MAX_ANSWER, verdict
from whet.types import Rewards, Task, Trajectory

VERIFY = "whet.reward.math.symbolic:verify_boxed"

NEAR, RELATED = 10, 70
"""Characters between two boxes that are one answer: fewer than NEAR, or fewer than RELATED with an `and`, `or`, comma or semicolon."""

_PIECE = re.compile(r"\\boxed\s*(?P<open>\{)|\\.|(?P<brace>[{}])", re.DOTALL)
_SEPARATOR = re.compile(r"\b(?:and|or)\b|,|;")
_DROPPED = (
    (re.compile(r"\\(?:left|right)(?![a-z])\s*\.?|\\!|\\\$|\\displaystyle(?![A-Za-z])"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\{,\}|,\\!"), ","),
    (re.compile(r"\\[,;:]|~"), " "),
)


class MathVerifyOptions(Config):
    """The reward `math_verify` has no options."""


class MathVerifyReward:
    r"""1 if math-verify calls the reply's answer equal to the label, else 0: six decimals agree, `x=5` is `5`, units do not count.

    The rule of verl's `math_verify`. The answer is the last `\boxed{}`, joined with those close before it (`\boxed{1} and \boxed{2}`);
    without one, what follows "answer is", or the last number. Only what `whet.reward.math.grammar` lets through is compared: math-verify
    evaluates plain text as Python, so it is given LaTeX alone, in a worker; what takes too many steps scores 0. The reward `math` is exact
    (`0.333333` is not `1/3`).
    """

    def __init__(self, options: MathVerifyOptions, pool: WorkerPool) -> None:
        self._pool = pool

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        task = trajectory.task
        label = label_of(task, "math_verify")
        raw = extract_verified(trajectory.response)
        if not raw or not label:
            return Rewards(0.0, detail="the label is empty" if raw else "the reply has no answer")
        if len(raw) > MAX_ANSWER:
            return verdict(None, raw, label)
        answer, label = _clean(raw), _clean(last_boxed(label) or label)
        if answer == label:
            return Rewards(1.0)
        check_label(task)
        try:
            check_formula(answer)
        except Refused as reason:
            return Rewards(0.0, detail=f"the answer is not compared as a formula: {reason}")
        arguments = {"label": label, "answer": answer}
        try:
            found = await self._pool.call(VERIFY, arguments, call_name("math_verify", task))
        except RewardTimeout as late:  # the steps are counted, so only a stopped machine comes here; the answer is the model's
            return Rewards(0.0, detail=f"the answer {answer[:200]!r} could not be compared in time: {late}")
        if found == "label":
            raise bad_row(task, f"has the label {label[:200]!r}, which the reward math_verify cannot use: it takes too much to compare")
        if found in ("equal", "different"):
            return verdict(found == "equal", answer, label)
        return Rewards(0.0, detail=f"the answer {answer[:200]!r} takes too much to compare ({found})")

    def close(self) -> None:
        """Nothing to release: the pool belongs to its maker."""


def check_label(task: Task) -> None:
    """Raises LabelError if a task has no label, or one that is no formula."""
    label = label_of(task, "math_verify")
    label = _clean(last_boxed(label) or label)
    try:
        if label:
            check_formula(label)
    except Refused as reason:
        raise bad_row(task, f"has the label {label[:200]!r}, which the reward math_verify cannot use: {reason}") from None


def extract_verified(response: str) -> str | None:
    """The final answer in a reply, or None if it has none."""
    text = response[-MAX_READ:]
    if "\\boxed" not in text:
        return stated_answer(text) or last_number(text)
    boxes = _closed_boxes(text)
    if not boxes or text.rfind("\\boxed") > boxes[-1][1]:  # the last one has no braces, or is never closed
        return last_boxed(text)
    parts, start = [boxes[-1][2]], boxes[-1][0]
    for opened, closed, content in reversed(boxes[:-1]):
        between = text[closed + 1 : start]
        related = len(between) < RELATED and content != parts[0] and _SEPARATOR.search(between)
        if len(between) >= NEAR and not related:
            break
        parts, start = ([content, *parts] if content != parts[0] else parts), opened
    return ",".join(parts)


def _closed_boxes(text: str) -> list[tuple[int, int, str]]:
    """Begin, end and content of each box; boxes within boxes are part of the outer one."""
    boxes: list[tuple[int, int, str]] = []
    braces: list[tuple[int, int] | None] = []
    """Open braces: for a box, its begin and its content's begin; otherwise None."""
    for match in _PIECE.finditer(text):
        if match.group("open"):
            braces.append((match.start(), match.end()))
        elif match.group("brace") == "{":
            braces.append(None)
        elif match.group("brace") and braces:
            box = braces.pop()
            if box is not None and not any(braces):
                boxes.append((box[0], match.start(), text[box[1] : match.start()].strip()))
    return boxes


def _clean(text: str) -> str:
    """Without what math-verify would drop and the grammar does not know; the rest is math-verify's to read."""
    for pattern, replacement in _DROPPED:
        text = pattern.sub(replacement, text)
    return text.strip().strip("$").strip()
