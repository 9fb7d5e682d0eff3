"""The reward `gpqa`: the letter of a multiple-choice answer, or its text."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass

from whet.config import Config
from whet.reward.base import bad_row
from whet.types import JSON, Rewards, Task

_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"(?:answer|option|choice)\s*(?:is|:)?\s*([A-Z])",
        r"([A-Z])\s*(?:is\s*(?:the)?\s*correct)",
        r"final\s*(?:answer|option)\s*(?:is|:)?\s*([A-Z])",
    )
)
_LONE = re.compile(r"\b([A-Z])\b")
_INDEX = re.compile(r"\d{1,3}(?:\.0*)?", re.ASCII)
_GAPS = re.compile(r"\s{50,}")
"""Longer white space than any answer has: cut down, so that no pattern can be made to search it again and again."""
MAX_READ = 50_000
"""Characters, from the reply's end, that are read."""


class GpqaOptions(Config):
    """The reward `gpqa` has no options."""


@dataclass(frozen=True, slots=True)
class RightAnswer:
    """A row's right answer."""

    letters: tuple[str, ...]
    """Letters of the choices."""
    right: str | None
    """The right one's letter, where the row tells it."""
    texts: tuple[str, ...]
    """Right answers in words."""
    label: str | None


def extract_letter(response: str, letters: Sequence[str]) -> str | None:
    """The chosen letter, upper case; None without one. What precedes the last `</think>` is not read, the case of `letters` does not count.

    The first of these whose first match names one of `letters`: a letter after answer, option or choice (with `is` or a colon); a letter
    before `is (the) correct`; a letter after `final answer` or `final option`; the last capital letter that is a word of its own.
    """
    reply, valid = _reply(response), {letter.upper() for letter in letters}
    for pattern in _PATTERNS:
        match = pattern.search(reply)
        if match and match.group(1).upper() in valid:
            return match.group(1).upper()
    return next((letter for letter in reversed(_LONE.findall(reply)) if letter in valid), None)


def score_gpqa(task: Task, response: str, options: GpqaOptions) -> Rewards:
    """1 if the reply chooses the right letter, or, where no letter can be compared, if it contains a right answer's words; else 0.

    The rule of slime's `gpqa`. What precedes the last `</think>` is not read. Of the row: `metadata.choices` (a list or an object),
    `metadata.valid_letters` (else as many as choices, else A to J), `metadata.correct_letter`, `metadata.correct_answer` and
    `metadata.answer_text`; the label is a letter, the index of a choice from 0 on, or a choice's text.
    """
    question = _question(task)
    letter = extract_letter(response, question.letters)
    if letter and question.right:
        return _verdict(letter == question.right, f"the reply chooses {letter}, not {question.right}")
    words = f" {_words(_reply(response))} "
    if any(f" {_words(text)} " in words for text in question.texts if _words(text)):
        return Rewards(1.0)
    if letter and not question.right and question.label:
        return _verdict(letter == question.label.upper(), f"the reply chooses {letter}, the label is {question.label[:200]!r}")
    return Rewards(0.0, detail="the reply has neither a letter to compare nor the words of a right answer")


def _reply(response: str) -> str:
    return _GAPS.sub(" " * 50, response.rpartition("</think>")[2][-MAX_READ:])


def _question(task: Task) -> RightAnswer:
    metadata, label = task.metadata, None if task.label is None else task.label.strip()
    choices = _texts(task, "choices")
    letters = tuple(letter.upper() for letter in _texts(task, "valid_letters")) or tuple(
        string.ascii_uppercase[: len(choices)] or string.ascii_uppercase[:10]
    )
    right = metadata.get("correct_letter")
    right = right.strip().upper() if isinstance(right, str) else None
    texts = [str(metadata[key]) for key in ("correct_answer", "answer_text") if metadata.get(key)]
    if label is None and right is None and not texts:
        raise bad_row(task, "has no label and no metadata.correct_letter, correct_answer or answer_text; the reward gpqa needs one of them")
    if label is not None:
        same = [letter for letter, choice in zip(letters, choices, strict=False) if label and _words(choice) == _words(label)]
        if len(label) == 1 and label.upper() in letters:
            right = right or label.upper()
        elif _INDEX.fullmatch(label) and not same and int(float(label)) < len(letters):
            right, label = letters[int(float(label))], None
        else:
            right = right or (same[0] if same else None)
            texts.append(label)
    if right in letters and letters.index(right) < len(choices):
        texts.append(choices[letters.index(right)])
    return RightAnswer(letters, right, tuple(texts), label)


def _texts(task: Task, key: str) -> list[str]:
    value: JSON = task.metadata.get(key)
    if value is None:
        return []
    values = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(values, list | tuple | str):
        raise bad_row(task, f"has metadata.{key} = {value!r}; the reward gpqa needs a list")
    return [str(item) for item in values]


def _words(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def _verdict(right: bool, reason: str) -> Rewards:
    return Rewards(1.0) if right else Rewards(0.0, detail=reason)
