"""The reward `math`: 1 if the reply's final answer equals the task's label as mathematics, else 0.

Numbers and words are decided here, exactly. What is left, and passes the whitelist of `whet.reward.grammar`, is
compared symbolically in a worker. Nothing that a model wrote is ever evaluated as code.
"""

from __future__ import annotations

import re

from whet.config import Config
from whet.reward.base import LabelError
from whet.reward.extract import Extract, after_hash, extract_answer, last_boxed
from whet.reward.grammar import MAX_LENGTH, Refused, check_formula
from whet.reward.normalise import normalise
from whet.reward.number import parse_number
from whet.reward.pool import WorkerPool
from whet.types import Rewards, Task, Trajectory

COMPARE = "whet.reward.symbolic:compare"

_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z][A-Za-z ,.'()-]*")


class MathOptions(Config):
    """Options of the reward `math`."""

    extract: Extract = "auto"
    r"""Where the answer stands: in the last `\boxed{}`, after the last `####`, as the last number, in the whole reply;
    auto: the first of box, hash, "the answer is ...", last number that there is."""


class MathReward:
    r"""Compares the reply's answer with `task.label`.

    The label is the answer itself, or a text that holds it in `\boxed{}` or after `####`.

    * Numbers are equal exactly (`0.5` is `\frac{1}{2}`; `0.33` is not `1/3`); units count if both sides name one.
    * A label of words (two letters or more, no formula) is compared as text, without regard to case.
    * Anything else must be a formula, and is compared symbolically; an answer that is no formula scores 0.

    Every score of 0 says why in `detail`. A missing label, or one that is no formula, is a `LabelError`.
    """

    def __init__(self, options: MathOptions, pool: WorkerPool) -> None:
        self._extract: Extract = options.extract
        self._pool = pool

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        label = read_label(trajectory.task)
        raw = extract_answer(trajectory.response, self._extract)
        if not raw:
            return Rewards(0.0, detail=f"the reply has no answer (extract = {self._extract})")
        if len(raw) > MAX_LENGTH * 4:
            return Rewards(0.0, detail=f"the answer is {len(raw)} characters long")
        answer = normalise(raw)
        equal = decide(label, answer)
        if equal is None:
            return await self._compare(trajectory.task, label, answer)
        return _verdict(equal, label, answer)

    def close(self) -> None:
        """The pool belongs to whoever made it."""

    async def _compare(self, task: Task, label: str, answer: str) -> Rewards:
        try:
            check_formula(answer)
        except Refused as reason:
            return Rewards(0.0, detail=f"the answer is not compared as a formula: {reason}")
        arguments = {"label": label, "answer": answer}
        verdict = await self._pool.call(COMPARE, arguments, f"reward math on task {task.id!r}")
        if verdict == "label":
            raise bad_label(task, "it is no formula that math-verify can read")
        if verdict == "answer":
            return Rewards(0.0, detail=f"the answer {answer!r} is no formula")
        return _verdict(verdict == "equal", label, answer)


def decide(label: str, answer: str) -> bool | None:
    """Whether two normalised answers are equal, as far as text and exact arithmetic can tell; None if they cannot."""
    if label.replace(" ", "") == answer.replace(" ", ""):
        return True
    if _WORDS.fullmatch(label):
        return label.casefold() == answer.casefold()
    label_number, answer_number = parse_number(label), parse_number(answer)
    if label_number is not None and answer_number is not None:
        return label_number.equals(answer_number)
    if label_number is not None and _WORDS.fullmatch(answer):
        return False
    return None


def formula_of(task: Task) -> str | None:
    """The formula that is a task's label; None where the label is a number or words, which need no reading.

    Raises:
        LabelError: it has none, or one that cannot be compared.
    """
    label = read_label(task)
    return None if parse_number(label) is not None or _WORDS.fullmatch(label) else label


def read_label(task: Task) -> str:
    """A task's label, normalised. Raises LabelError if it has none, or one that cannot be compared."""
    if task.label is None or not task.label.strip():
        raise bad_label(task, "it is missing")
    label = normalise(after_hash(task.label) or last_boxed(task.label) or task.label)
    if parse_number(label) is None and not _WORDS.fullmatch(label):
        try:
            check_formula(label)
        except Refused as reason:
            raise bad_label(task, str(reason)) from None
    return label


def bad_label(task: Task, reason: str) -> LabelError:
    """The error for a row whose label is no answer."""
    place = f" ({task.origin})" if task.origin else ""
    label = "None" if task.label is None else repr(task.label[:200])
    return LabelError(
        f"task {task.id!r}{place}: the reward math cannot use its label {label}: {reason}. "
        "Correct the row, or score it with the reward exact or your own function."
    )


def _verdict(equal: bool, label: str, answer: str) -> Rewards:
    if equal:
        return Rewards(1.0)
    return Rewards(0.0, detail=f"the answer {answer[:200]!r} is not the label {label[:200]!r}")
