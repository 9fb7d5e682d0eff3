r"""The reward `prime_math`: PRIME's reading of mathematics answers (arXiv 2502.01456), generous in form and in precision."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from whet.config import Config
from whet.reward.base import RewardTimeout, call_name, label_of
from whet.reward.math.formula import parse_latex
from whet.reward.math.grammar import Refused
from whet.reward.math.normalise import normalise
from whet.reward.math.values import ZERO
from whet.reward.pool import WorkerPool
from whet.reward.published.hendrycks import MAX_ANSWER
from whet.reward.published.prm800k import decide
from whet.types import Rewards, Task, Trajectory

CLOSE = "whet.reward.math.values:close_enough"
TOLERANCE = 1e-4
"""Relative; of numbers."""

_BEFORE = ("answer:", "answer is", "answers are")
_AFTER = ("is answer", "is the answer", "are answers", "are the answers")
_LEADS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
_BRACE = re.compile(r"[{}]")
_MONEY, _PERCENT = re.compile(r"\$\d+(?:\.\d+)?"), re.compile(r"\d+(?:\.\d+)?\\?%")
_PI = re.compile(r"\\pi(?![A-Za-z])")
MAX_READ = 50_000
"""Characters, from the reply's end, that are read."""


class PrimeMathOptions(Config):
    """The reward `prime_math` has no options."""


@dataclass(frozen=True, slots=True)
class _Open:
    """Pairs of label and answer that still have to be found close."""

    pairs: tuple[tuple[str, str], ...]


class PrimeMathReward:
    r"""1 if the answer is the label by the rules of PRM800K, or in value: within 1e-4, as a percentage or a part, with 3.14 for pi; else 0.

    The rule of verl's `prime_math`. The answer is what follows "answer:", "answer is" and their like; in it the last box; in it what
    follows the last "is", "=" or colon. Where the original evaluates text, whet reads formulas by its grammars
(`whet.reward.math.arithmetic`,
    `whet.reward.math.formula`) in a worker; what they do not read is not equal.
    """

    def __init__(self, options: PrimeMathOptions, pool: WorkerPool) -> None:
        self._pool = pool

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        task = trajectory.task
        label = label_of(task, "prime_math")
        answer = extract_prime(trajectory.response)
        if len(answer) > MAX_ANSWER:
            return Rewards(0.0, detail=f"the answer is {len(answer)} characters long; at most {MAX_ANSWER} are compared")
        try:
            if await self._equal(task, answer, label):
                return Rewards(1.0)
        except RewardTimeout as late:  # the work is bounded, so only a stopped machine comes here; the answer is the model's
            return Rewards(0.0, detail=f"the answer {answer[:200]!r} could not be compared in time: {late}")
        return Rewards(0.0, detail=f"the answer {answer[:200]!r} is not the label {label[:200]!r}")

    def close(self) -> None:
        """Nothing to release: the pool belongs to its maker."""

    async def _equal(self, task: Task, answer: str, label: str) -> bool:
        if await self._strictly(task, answer, label):
            return True
        for pi in (None, "3.14") if _PI.search(answer) or _PI.search(label) else (None,):
            if await self._loosely(task, _with_pi(answer, pi), _with_pi(label, pi)):
                return True
        return False

    async def _strictly(self, task: Task, answer: str, label: str) -> bool:
        decision = decide(answer, label, more_units=True, keep_spaces=True)
        for one, other in decision.differences:
            if not await self._pool.call(ZERO, {"first": one, "second": other}, call_name("prime_math", task)):
                return False
        return decision.equal or bool(decision.differences)

    async def _loosely(self, task: Task, answer: str, label: str) -> bool:
        outcome = compare_loosely(answer, label)
        if isinstance(outcome, bool):
            return outcome
        for one, other in outcome.pairs:
            try:
                trees = [parse_latex(normalise(text).replace("\\degree", "")) for text in (one, other)]
            except Refused:
                return False
            arguments = {"first": trees[0], "second": trees[1], "tolerance": TOLERANCE}
            if not await self._pool.call(CLOSE, arguments, call_name("prime_math", task)):
                return False
        return True


def extract_prime(response: str) -> str:
    """The part of a reply that is taken for its answer; the whole of it where nothing marks one."""
    text = response[-MAX_READ:]
    for marker in _BEFORE:
        text = _cut(text, marker, keep_after=True)
    for marker in _AFTER:
        text = _cut(text, marker, keep_after=False)
    text = _last_box(text) or text
    text = _cut(text, ". ", keep_after=False)
    for marker in _LEADS:
        text = _cut(text, marker, keep_after=True)
    return text


def compare_loosely(answer: str, label: str) -> bool | _Open:
    """Equal or not as texts, numbers or lists of them; else the pairs that symbolic comparison has to decide."""
    answer, label = _bare(answer), _bare(label)
    if answer.strip().lower() == label.strip().lower() or answer.replace(" ", "") == label.replace(" ", ""):
        return True
    number, wanted = _number(answer), _number(label)
    if number is not None and wanted is not None:
        return any(math.isclose(value, number, rel_tol=TOLERANCE) for value in (wanted / 100, wanted, wanted * 100))
    if not answer.strip():
        return False
    answer, label = answer.strip(), label.strip()
    if label and _flat(answer) == _flat(label):
        return True
    if "," in answer and "," in label:
        inner = answer[:1] in "([" and answer[-1:] in ")]" and (answer[:1], answer[-1:]) == (label[:1], label[-1:])
        answers, labels = ((text[1:-1] if inner else text).split(",") for text in (answer, label))
        if len(answers) == len(labels):
            return _all([compare_loosely(one.strip(), other.strip()) for one, other in zip(answers, labels, strict=True)])
    return _Open(((label, answer),))


def _all(outcomes: list[bool | _Open]) -> bool | _Open:
    if any(outcome is False for outcome in outcomes):
        return False
    pairs = tuple(pair for outcome in outcomes if isinstance(outcome, _Open) for pair in outcome.pairs)
    return _Open(pairs) if pairs else True


def _cut(text: str, marker: str, *, keep_after: bool) -> str:
    """The text after the last marker, or before it, in any case; the whole text without a marker."""
    place = text.lower().rfind(marker)
    if place < 0:
        return text
    return (text[place + len(marker) :] if keep_after else text[:place]).strip()


def _last_box(text: str) -> str | None:
    start = text.rfind("\\boxed")
    start = text.rfind("\\fbox") if start < 0 else start
    depth, opening = 0, -1
    for match in _BRACE.finditer(text, start) if start >= 0 else ():
        depth += 1 if match.group() == "{" else -1
        opening = match.start() if opening < 0 and match.group() == "{" else opening
        if depth == 0 and match.group() == "}":
            return text[opening + 1 : match.start()].strip()
    return None


def _with_pi(text: str, pi: str | None) -> str:
    return text if pi is None else _PI.sub(f"({pi})", text)


def _bare(text: str) -> str:
    if _MONEY.match(text):
        return text[1:]
    return text.rstrip("\\%") if _PERCENT.fullmatch(text) else text


def _number(text: str) -> float | None:
    try:
        number = float(text.replace("{,}", "").replace(",", ""))
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _flat(text: str) -> str:
    if len(text) > 1 and (text[0], text[-1]) in (("[", "]"), ("(", ")")):
        text = text.strip("[]()")
    return text.translate({ord(mark): None for mark in "{}()"})
