"""Where the final answer stands in a reply. Every strategy takes time linear in what it reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

Extract = Literal["auto", "boxed", "hash", "last_number", "whole"]

MAX_READ = 50_000
"""Characters, from the end of a reply, in which an answer is looked for."""

_BOX = re.compile(r"\\f?box(?:ed)?\s*(?=\{|[0-9])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_SAID = re.compile(r"\banswer(?:\s+is|\s*:)\s*:?", re.IGNORECASE)
_MATHS = re.compile(r"\$([^$\n]{1,500})\$|\\\(([^\n]{1,500}?)\\\)")
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_NUMBER = re.compile(
    r"(?:(?<![\w.)}])-\s?)?(?:\\?\$)?"
    r"(?:\\[dt]?frac\s?\{-?\d{1,50}\}\s?\{\d{1,50}\}"
    r"|(?:\d{1,3}(?:,\d{3})+(?![\d])|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+(?![\d.]))?|\.\d+)"
    r"(?:\s?\\?%)?"
)


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` holds; None if there is none or it is never closed."""
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    if start is None:
        return None
    if text[start] != "{":
        return text[start]
    depth = 0
    for match in _BRACE.finditer(text, start):
        if match.group() in "{}":
            depth += 1 if match.group() == "{" else -1
            if depth == 0:
                return text[start + 1 : match.start()].strip()
    return None


def after_hash(text: str) -> str | None:
    """The rest of the line after the last `####`, the form of GSM8K."""
    _, mark, rest = text.rpartition("####")
    lines = rest.strip().splitlines() if mark else []
    return lines[0].strip() if lines else None


def last_number(text: str) -> str | None:
    r"""The last number: digits with thousands separators, a decimal, `a/b`, `\frac{a}{b}`, with $ or %."""
    found = None
    for match in _NUMBER.finditer(text):
        found = match.group()
    return found


def said(text: str) -> str | None:
    """What follows the last "answer is" or "answer:": the formula if it is marked as one, else the sentence's rest."""
    last = None
    for match in _SAID.finditer(text):
        last = match
    if last is None:
        return None
    rest = text[last.end() :].lstrip(" \t*")
    end = _SENTENCE_END.search(rest)
    sentence = rest[: end.start()] if end else rest
    formula = _MATHS.search(sentence)
    answer = (formula.group(1) or formula.group(2)) if formula else sentence
    return answer.strip(" \t*") or None


def auto(text: str) -> str | None:
    """The last box; without any box, what follows the last `####`; else what is said to be the answer; or a number."""
    if _BOX.search(text):
        return last_boxed(text)
    for strategy in (after_hash, said, last_number):
        answer = strategy(text)
        if answer is not None:
            return answer
    return None


_STRATEGIES: dict[Extract, Callable[[str], str | None]] = {
    "auto": auto,
    "boxed": last_boxed,
    "hash": after_hash,
    "last_number": last_number,
    "whole": lambda text: text.strip() or None,
}


def extract_answer(text: str, extract: Extract) -> str | None:
    """The final answer in a reply, or None if it has none there."""
    return _STRATEGIES[extract](text if extract == "whole" else text[-MAX_READ:])
