r"""Rewards that compare what the last `\boxed{}` holds by the strict rules of PRM800K: `slime_math`, `deepscaler`, `geo3k`.

They give the scores that other trainers give under these names. For correct mathematics rather than the same scores, use the reward `math`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from whet.config import Config
from whet.reward.base import RewardTimeout, call_name, label_of
from whet.reward.math.values import ZERO
from whet.reward.pool import WorkerPool
from whet.reward.published.hendrycks import MAX_ANSWER, last_box
from whet.reward.published.prm800k import Decision, decide
from whet.types import Rewards, Task, Trajectory

_THINK_END, _RESPONSE = "</think>", "###Response"


class BoxedMathOptions(Config):
    """The rewards `slime_math` and `deepscaler` have no options."""


class Geo3kOptions(Config):
    """Options of the reward `geo3k`."""

    format_weight: float = Field(default=0.1, ge=0, le=1)
    """Share of the score that the form `<think>...</think>...\\boxed{...}` earns; the answer earns the rest."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result of a rule for a reply: the answer it found and the comparison that is left to do."""

    answer: str
    label: str
    decision: Decision
    bonus: float = 0.0
    """Added to the score for any answer."""
    value: float = 1.0
    """Score of a right answer."""
    missing: str = ""
    """Why a right answer does not score 1."""


class BoxedReward:
    """Applies a rule; differences of formulas that the rule leaves are computed in a worker, the answer only ever as a tree."""

    def __init__(self, name: str, rule: Callable[[Task, str], Comparison], pool: WorkerPool) -> None:
        self._name, self._rule, self._pool = name, rule, pool

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        task = trajectory.task
        found = self._rule(task, trajectory.response)
        decision = found.decision
        equal = decision.equal or bool(decision.differences)
        try:
            for one, other in decision.differences:
                arguments = {"first": one, "second": other}
                equal = equal and await self._pool.call(ZERO, arguments, call_name(self._name, task))
        except RewardTimeout as late:  # the work is bounded, so only a stopped machine comes here; the answer is the model's
            return Rewards(found.bonus, detail=f"the answer {found.answer[:200]!r} could not be compared in time: {late}")
        if equal:
            return Rewards(found.bonus + found.value, detail=found.missing)
        reason = decision.reason or f"the answer {found.answer[:200]!r} is not the label {found.label[:200]!r}"
        return Rewards(found.bonus, detail=reason)

    def close(self) -> None:
        """Nothing to release: the pool belongs to its maker."""


def slime_math(task: Task, response: str) -> Comparison:
    r"""1 if what the last `\boxed{...}` holds is the label by the rules of PRM800K, else 0.

    The rule of slime's `math`. The label may stand in a box itself; an empty label is never met.
    """
    label = label_of(task, "slime_math")
    return _compare(last_box(response), last_box(label) if "\\boxed" in label else label)


def deepscaler(task: Task, response: str) -> Comparison:
    """As `slime_math`, in what follows the last `</think>`; without one, what follows the first `###Response`; else 0.

    The rule of slime's `deepscaler` (Agentica's DeepScaleR).
    """
    label = label_of(task, "deepscaler")
    if _THINK_END in response:
        reply = response.rpartition(_THINK_END)[2]
    elif _RESPONSE in response:
        reply = response.split(_RESPONSE, 2)[1]
    else:
        return Comparison("", label, Decision(False, reason=f"the reply has neither {_THINK_END} nor {_RESPONSE}"))
    return _compare(last_box(reply), last_box(label) if "\\boxed" in label or "\\fbox" in label else label)


def geo3k(task: Task, response: str, options: Geo3kOptions) -> Comparison:
    r"""0.9 for an answer in the last `\boxed{}` that is the label by the rules of PRM800K, 0.1 for the form.

    The rule of verl's `geo3k` (MathRuler). The form: the reply starts with `<think>`, and after a `</think>` a `\boxed{` is closed.
    """
    label = label_of(task, "geo3k")
    start = response.rfind("\\boxed{")
    answer = last_box(response[start:]) if start >= 0 else None
    found = _compare("None" if answer is None else answer.strip(), label)
    missing = "" if _has_form(response) else "the reply is not of the form <think>...</think>...\\boxed{...}"
    bonus = 0.0 if missing else options.format_weight
    return Comparison(found.answer, label, found.decision, bonus, 1.0 - options.format_weight, missing)


def _compare(answer: str | None, label: str | None) -> Comparison:
    if answer is None:
        return Comparison("", label or "", Decision(False, reason="the reply has no closed \\boxed{}"))
    if not label:
        return Comparison(answer, "", Decision(False, reason="the label is empty, or its \\boxed{} is never closed"))
    if len(answer) > MAX_ANSWER:
        reason = f"the answer is {len(answer)} characters long; at most {MAX_ANSWER} are compared"
        return Comparison(answer, label, Decision(False, reason=reason))
    return Comparison(answer, label, decide(answer, label))


def _has_form(response: str) -> bool:
    place = response.find(_THINK_END) if response.startswith("<think>") else -1
    place = response.find("\\boxed{", place) if place >= 0 else -1
    return place >= 0 and "}" in response[place:]
