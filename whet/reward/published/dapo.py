# ruff: noqa: SIM905
r"""The rewards of DAPO (arXiv 2503.14476): the last `Answer:` line against the label as text, and the soft penalty for over-long replies.

The spelling is that of Minerva (Lewkowycz et al., arXiv 2206.14858, appendix D), as EleutherAI's evaluation harness and verl have it.
"""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from whet.config import Config
from whet.reward.base import bad_row, label_of
from whet.types import JSON, Rewards, Task, Trajectory

TAIL = 300
"""Characters, from the reply's end, in which the answer is looked for."""
BOX_TAIL = 100
"""The same under `strict_box`."""
INVALID = "[INVALID]"
"""Marker for the answer of a reply that has none."""

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_REPLACED = (
    ("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text"), (",\\text{and}", ","),
    ("\\text{and}", ","), ("\\text{m}", "\\text{}"),
)  # fmt: skip
_UNITS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits cents degrees cm gm pounds meters meals "
    "edges students childrentickets multiples"
).split()
_MARKS = (
    "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}",
    "\\;", ",\\!", "{,}", '"', "\\dots",
)  # fmt: skip
_TURN_ENDS = ("<|im_end|>", "<|endoftext|>")
_FORMULA = re.compile(r"[^$\n]*\$([^$\n]*)\$[^\n]*")
_UNWRAPPED = tuple(re.compile(rf"\\{name}\{{([^}}\n]*)\}}") for name in ("text", "textbf", "overline"))
_BOX = re.compile(r"\\boxed\{(.*)\}")
_SHORT_FRACTION = re.compile(r"frac([^{])(.)")
_SHORT_ROOT = re.compile(r"sqrt([^{])")


class DapoOptions(Config):
    """Options of the reward `slime_dapo`."""

    strict_box: bool = False
    r"""Compare the content of the last `\boxed{}` of the last 100 characters with the label, both
    unchanged, instead of the `Answer:` line."""


class VerlDapoOptions(DapoOptions):
    """Options of the reward `verl_math_dapo`."""

    box_fallback: bool = False
    r"""Without an `Answer:` line, compare the last `\boxed{}` of the last 100 characters, respelled as the line is (verl's later rule)."""


class OverlongOptions(Config):
    """Options of the reward `overlong`."""

    max_tokens: int = Field(gt=0)
    """Sampled tokens that a reply may have at most."""
    buffer_tokens: int = Field(gt=0)
    """Number of tokens before `max_tokens` at which the penalty begins."""
    factor: float = Field(default=1.0, ge=0)
    """The penalty at max_tokens; it goes on growing beyond."""

    @model_validator(mode="before")
    @classmethod
    def _buffer_fits(cls, values: JSON) -> JSON:
        limit, buffer = values.get("max_tokens"), values.get("buffer_tokens")
        if isinstance(limit, int) and isinstance(buffer, int) and buffer > limit:
            raise ValueError(f"buffer_tokens = {buffer} is more than max_tokens = {limit}; the penalty would begin before the first token")
        return values


class OverlongPenalty:
    """0 up to `max_tokens - buffer_tokens` sampled tokens, then falling linearly to `-factor` at max_tokens (DAPO, eq. 13).

    Meant as a component in addition to the reward of the answer; the total is their sum.
    """

    def __init__(self, options: OverlongOptions) -> None:
        self._options = options

    async def __call__(self, trajectory: Trajectory) -> Rewards:
        options, num_tokens = self._options, trajectory.num_tokens_sampled
        penalty = overlong_penalty(num_tokens, options.max_tokens, options.buffer_tokens, options.factor)
        return Rewards(penalty, detail=f"the reply has {num_tokens} tokens") if penalty < 0 else Rewards(0.0)

    def close(self) -> None:
        """Nothing to release."""


def final_answer(response: str) -> str:
    """The last `Answer:` line of the last 300 characters, not yet respelled; `[INVALID]` without one."""
    found = _ANSWER.findall(response[-TAIL:])
    return found[-1] if found else INVALID


def respell_final(answer: str, *, turn_ends: bool) -> str:
    r"""Minerva's spelling: what follows the last `=`, without articles, spaces, units, dollar signs and `\text{}`.

    Whole numbers lose their commas. `turn_ends`: the marks that end a turn go, too.
    """
    text = answer.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for dropped in (*_UNITS, *_MARKS, *(_TURN_ENDS if turn_ends else ())):
        text = text.replace(dropped, "")
    text = _FORMULA.sub(r"$\1$", text)
    for wrapped in _UNWRAPPED:
        text = wrapped.sub(r"\1", text)
    text = _BOX.sub(r"\1", text)
    text = _SHORT_ROOT.sub(r"sqrt{\1}", _SHORT_FRACTION.sub(r"frac{\1}{\2}", text)).replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text.strip()


def slime_dapo(task: Task, response: str, options: DapoOptions) -> Rewards:
    """1 if the last `Answer:` line is the label, else -1; the label is a number, of which the whole part counts.

    The rule of slime's `dapo`: `42.7` asks for 42. A label that is no number is a `LabelError`.
    """
    label = label_of(task, "slime_dapo")
    if options.strict_box:
        return _score_box(response, label)
    respelled = respell_final(label, turn_ends=True)
    try:
        whole = str(int(float(respelled)))
    except (ValueError, OverflowError):
        raise bad_row(task, f"has the label {label[:200]!r}; the reward slime_dapo needs a number (verl_math_dapo does not)") from None
    return _score_line(respell_final(final_answer(response), turn_ends=True), whole)


def verl_math_dapo(task: Task, response: str, options: VerlDapoOptions) -> Rewards:
    """1 if the last `Answer:` line is the label once both are respelled, else -1.

    The rule of verl's `math_dapo`.
    """
    label = label_of(task, "verl_math_dapo")
    if options.strict_box:
        return _score_box(response, label)
    answer = final_answer(response)
    if answer == INVALID and options.box_fallback:
        boxed = boxed_answer(response)
        answer = INVALID if boxed is None else boxed
    return _score_line(respell_final(answer, turn_ends=False), respell_final(label, turn_ends=False))


def boxed_answer(response: str) -> str | None:
    r"""Content of the last `\boxed{}` in the last 100 characters, unchanged; None if there is no box or
    it is never closed."""
    tail = response[-BOX_TAIL:]
    start = tail.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start, len(tail)):
        depth += (tail[place] == "{") - (tail[place] == "}")
        if tail[place] == "}" and depth == 0:
            return tail[start + len("\\boxed{") : place]
    return None


def _score_box(response: str, label: str) -> Rewards:
    answer = boxed_answer(response)
    if answer is None:
        return _verdict(False, f"the last {BOX_TAIL} characters of the reply have no closed \\boxed{{}}")
    return _verdict(answer == label, f"the answer {answer!r} is not the label {label[:200]!r}")


def _score_line(answer: str, label: str) -> Rewards:
    missing = f"the last {TAIL} characters of the reply have no answer"
    return _verdict(answer == label, missing if answer == INVALID else f"the answer {answer!r} is not the label {label[:200]!r}")


def _verdict(right: bool, reason: str) -> Rewards:
    parts = {"score": 1.0 if right else -1.0, "accuracy": float(right)}
    return Rewards(parts["score"], parts, "" if right else reason)


def overlong_penalty(length: int, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """Soft overlong punishment: 0 up to max_length - buffer tokens, then falling to -factor at max_length and on, linearly.

    Source: DAPO, arXiv 2503.14476, eq. 13.

    Args:
        length: sampled tokens.
        max_length: the token limit.
        buffer: tokens before the limit over which the penalty grows.
        factor: the penalty at the limit.
    """
    if buffer <= 0:
        raise ValueError(f"the buffer of the overlong penalty must be positive, not {buffer}")
    return min(-(length - (max_length - buffer)) / buffer * factor, 0.0)
