"""Calls as Python writes them, `name(key=value, ...)`, read without evaluating anything."""

from __future__ import annotations

import re

from whet.data.formats.reading import read_json
from whet.types import JSON

MAX_DEPTH = 32
"""Lists and objects within one another."""
_NAME = re.compile(r"\s*([A-Za-z_][\w.\-]{0,255})\s*\(")
_KEY = re.compile(r"\s*([A-Za-z_]\w{0,255})\s*=(?!=)")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_WORD = re.compile("|".join(_WORDS) + r"\b")
_TEXT = re.compile(r"'((?:[^'\\\n]|\\.)*)'|\"((?:[^\"\\\n]|\\.)*)\"", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))", re.DOTALL)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_SPACE = re.compile(r"\s*")


def is_pythonic_call(text: str, at: int) -> bool:
    """True if there is a `name(` at a place."""
    return _NAME.match(text, at) is not None


def read_pythonic_call(text: str, at: int) -> tuple[str, dict[str, JSON], int]:
    """Name and arguments of the call at a place, and the place behind it.

    Raises:
        ValueError: there is none, or it has arguments without a name, or values that are no plain ones.
    """
    named = _NAME.match(text, at)
    if named is None:
        raise ValueError("a call is written name(key=value, ...)")
    name, at = named[1], _space(text, named.end())
    arguments: dict[str, JSON] = {}
    while not text.startswith(")", at):
        key = _KEY.match(text, at)
        if key is None:
            raise ValueError(f"the call of {name} has {text[at : at + 20]!r} where key=value or ) is due")
        arguments[key[1]], at = _value(text, _space(text, key.end()), 0)
        at = _space(text, at)
        if text.startswith(",", at):
            at = _space(text, at + 1)
        elif not text.startswith(")", at):
            raise ValueError(f"the call of {name} is never closed by )")
    return name, arguments, at + 1


def _value(text: str, at: int, depth: int) -> tuple[JSON, int]:
    if depth > MAX_DEPTH:
        raise ValueError(f"a value has more than {MAX_DEPTH} lists within one another")
    if written := _TEXT.match(text, at):
        return _ESCAPE.sub(_unescaped, written[1] if written[1] is not None else written[2]), written.end()
    if word := _WORD.match(text, at):
        return _WORDS[word[0]], word.end()
    if text.startswith("{", at):
        return _object(text, _space(text, at + 1), depth)
    if text[at : at + 1] in ("[", "("):
        return _list(text, _space(text, at + 1), "]" if text[at] == "[" else ")", depth)
    if text[at : at + 1] not in "-0123456789" or at >= len(text):
        raise ValueError(f"{text[at : at + 20]!r} is no plain value")
    return read_json(text, at)


def _list(text: str, at: int, end: str, depth: int) -> tuple[JSON, int]:
    items: list[JSON] = []
    while not text.startswith(end, at):
        item, at = _value(text, at, depth + 1)
        items.append(item)
        at = _comma(text, _space(text, at), end)
    return items, at + 1


def _object(text: str, at: int, depth: int) -> tuple[JSON, int]:
    out: dict[str, JSON] = {}
    while not text.startswith("}", at):
        key, at = _value(text, at, depth + 1)
        at = _space(text, at)
        if not isinstance(key, str) or not text.startswith(":", at):
            raise ValueError(f"{text[at : at + 20]!r} is where a key of text and : are due")
        out[key], at = _value(text, _space(text, at + 1), depth + 1)
        at = _comma(text, _space(text, at), "}")
    return out, at + 1


def _comma(text: str, at: int, end: str) -> int:
    if text.startswith(",", at):
        return _space(text, at + 1)
    if not text.startswith(end, at):
        raise ValueError(f"{text[at : at + 20]!r} is where , or {end} is due")
    return at


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code:
        return chr(int(code, 16))
    return _SHORT.get(match[4], match[4] if match[4] in "\\'\"" else match[0])


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
