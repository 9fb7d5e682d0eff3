"""Places in a formula outside of all brackets. Every function takes time linear in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_BRACKET = re.compile(r"\\[{}]|\\(?:langle|rangle|begin|end|lfloor|rfloor|lceil|rceil)(?![A-Za-z])|\\.|[()\[\]{}]", re.DOTALL)
_OPENERS = frozenset(("(", "[", "{", "\\{", "\\langle", "\\begin", "\\lfloor", "\\lceil"))
_CLOSERS = frozenset((")", "]", "}", "\\}", "\\rangle", "\\end", "\\rfloor", "\\rceil"))


def top_level(text: str) -> list[bool]:
    """For each character, whether no bracket is open there; brackets themselves are not."""
    outside, depth, place = [True] * len(text), 0, 0
    for match in _BRACKET.finditer(text):
        if depth:
            outside[place : match.start()] = [False] * (match.start() - place)
        bracket = match.group()
        depth += (bracket in _OPENERS) - (bracket in _CLOSERS)
        if bracket in _OPENERS or bracket in _CLOSERS or depth:
            outside[match.start() : match.end()] = [False] * (match.end() - match.start())
        place, depth = match.end(), max(depth, 0)
    if depth:
        outside[place:] = [False] * (len(text) - place)
    return outside


def find_top(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    """The matches of a pattern that begin outside of all brackets."""
    outside = top_level(text)
    return [match for match in pattern.finditer(text) if outside[match.start()]]


def split_top(text: str, separators: Sequence[str]) -> list[str]:
    """The parts of a text between separators (patterns) that stand outside of all brackets."""
    parts, place = [], 0
    for match in find_top(text, re.compile("|".join(separators))):
        parts.append(text[place : match.start()].strip())
        place = match.end()
    return [*parts, text[place:].strip()]


def bracketed(text: str) -> tuple[str, str, str] | None:
    """The opening bracket, the inside and the closing bracket of a text that one pair of brackets encloses; None for any other.

    The two may be of different kinds, as in `[1, 2)` and `]1, 2[`.
    """
    if len(text) > 2 and text[0] == "]" and text[-1] == "[":
        return "]", text[1:-1], "["
    opened = _BRACKET.match(text)
    if opened is None or opened.group() not in _OPENERS or opened.group() == "\\begin":
        return None
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += (match.group() in _OPENERS) - (match.group() in _CLOSERS)
        if depth == 0:
            return (opened.group(), text[opened.end() : match.start()], match.group()) if match.end() == len(text) else None
    return None
