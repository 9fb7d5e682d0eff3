"""The reward `math`: 1 if the reply's final answer equals the task's label as mathematics, else 0.

Both are read by whet's own grammars (`whet.reward.math.forms`); numbers and words are decided here, exactly, formulas by their values in a
worker, in bounded work. What cannot be read for certain is compared as text. Nothing that a model wrote is ever evaluated as code.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from whet.config import Config
from whet.reward.base import LabelError, RewardTimeout
from whet.reward.math.equality import BAD_LABEL, SETTLE, Question, compare
from whet.reward.math.extract import Extract, after_hash, extract_answer, last_boxed
from whet.reward.math.forms import Form, read_form
from whet.reward.math.formula import Ambiguous
from whet.reward.math.grammar import MAX_LENGTH, Refused
from whet.reward.math.normalise import normalise
from whet.reward.math.words import canonical_words, choice_with_text
from whet.reward.pool import WorkerPool
from whet.types import Rewards, Task, Trajectory

_LOOSE_SPACE = re.compile(r"(?<![\w.])\s+|\s+(?![\w.])")
"""White space that parts no two words or numbers."""


class MathOptions(Config):
    """Options of the reward `math`."""

    extract: Extract = "auto"
    r"""Place of the answer: the last `\boxed{}`, after the last `####`, the last number, or the whole
    reply; auto: the first of box, hash, "the answer is ...", last number that exists."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A normalised answer with what it was read as; `form` is None where only its text is compared, `reason` says why."""

    text: str
    form: Form | None
    reason: str = ""


class MathReward:
    r"""Compares the reply's answer with `task.label`.

    The label is the answer itself, or a text that holds it in `\boxed{}` or after `####`.

    * Numbers are equal exactly (`0.5` is `\frac{1}{2}`; `0.33` is not `1/3`). Units count if both sides name one, and are converted.
    * Formulas are equal if they have the same values; lists and sets in any order, points, intervals and matrices part by part.
    * `x = 5` is `5`; another equation is equal to its multiples alone.
    * Words, dates, choices and what can be read in several ways are compared as text, without regard to case.

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
        answer = read_answer(raw)
        equal = decide_readings(label, answer)
        if isinstance(equal, Question):
            return await self._settle(trajectory.task, label, answer, equal)
        return _verdict(equal, label, answer)

    def close(self) -> None:
        """Nothing to release: the pool belongs to its maker."""

    async def _settle(self, task: Task, label: Reading, answer: Reading, question: Question) -> Rewards:
        try:
            verdict = await self._pool.call(SETTLE, {"question": question.data}, f"reward math on task {task.id!r}")
        except RewardTimeout as late:  # the work is bounded, so only a stopped machine comes here; the answer is the model's
            return Rewards(0.0, detail=f"the answer {answer.text[:200]!r} could not be compared in time: {late}")
        if verdict in ("equal", "different"):
            return _verdict(verdict == "equal", label, answer)
        if verdict.startswith(BAD_LABEL):
            raise _bad_label(task, verdict.removeprefix(BAD_LABEL))
        return Rewards(0.0, detail=f"the answer {answer.text[:200]!r} is not compared as a formula: {verdict}")


def read_answer(raw: str) -> Reading:
    """The reading of an answer as a reply or a label has it."""
    text = normalise(raw)
    try:
        return Reading(text, read_form(text) if text else None)
    except Refused as reason:
        return Reading(text, None, str(reason))


def decide(label: str, answer: str) -> bool | None:
    """True if two normalised answers are equal, as far as text and exact arithmetic can tell; None if
    only values of formulas can tell."""
    equal = decide_readings(read_answer(label), read_answer(answer))
    return None if isinstance(equal, Question) else equal


def decide_readings(label: Reading, answer: Reading) -> bool | Question:
    """True if two answers are equal; a question if only values of formulas can tell."""
    if _tight(label.text) == _tight(answer.text):
        return True
    if label.form is None or answer.form is None:
        return False
    if label.form.kind == "choice" and answer.form.kind != "choice":
        return choice_with_text(answer.text) == label.form.key[0]
    if "words" in (label.form.kind, answer.form.kind):
        return canonical_words(label.text) == canonical_words(answer.text) or label.form.key == answer.form.key != ()
    return compare(label.form, answer.form)


@functools.lru_cache(maxsize=1024)
def _read_label(label: str) -> Reading | str:
    """The reading of a label, or the reason that it has none. A label with several readings is compared
    as text."""
    text = normalise(after_hash(label) or last_boxed(label) or label)
    try:
        return Reading(text, read_form(text))
    except Ambiguous as reason:
        return Reading(text, None, str(reason))
    except Refused as reason:
        return str(reason)


def read_label(task: Task) -> Reading:
    """The reading of a task's label. Raises LabelError if it has none, or one that cannot be compared."""
    reading = _read_label(task.label) if task.label is not None and task.label.strip() else "it is missing"
    if isinstance(reading, str):
        raise _bad_label(task, reading)
    return reading


def _bad_label(task: Task, reason: str) -> LabelError:
    place = f" ({task.origin})" if task.origin else ""
    label = "None" if task.label is None else repr(task.label[:200])
    return LabelError(
        f"task {task.id!r}{place}: the reward math cannot use its label {label}: {reason}. "
        "Correct the row, or score it with the reward exact or your own function."
    )


def _tight(text: str) -> str:
    return _LOOSE_SPACE.sub("", text)


def _verdict(equal: bool, label: Reading, answer: Reading) -> Rewards:
    if equal:
        return Rewards(1.0)
    if answer.reason:
        return Rewards(0.0, detail=f"the answer is not compared as a formula: {answer.reason}")
    return Rewards(0.0, detail=f"the answer {answer.text[:200]!r} is not the label {label.text[:200]!r}")
