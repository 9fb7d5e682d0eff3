"""Extraction of the final answer from a reply. Every strategy takes time linear in the text that it
reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from whet.reward.math.units import is_known

Extract = Literal["auto", "boxed", "hash", "last_number", "whole"]

MAX_READ = 50_000
"""Characters, from the end of a reply, in which an answer is looked for."""

_BOX = re.compile(r"\\f?box(?:ed)?\s*(?=\{|[0-9])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_STATED = re.compile(r"\banswer(?:\s+is|\s*:)\s*:?", re.IGNORECASE)
_MATHS = re.compile(r"\$([^$\n]{1,500})\$|\\\(([^\n]{1,500}?)\\\)")
_SENTENCE_END = re.compile(r"[.?](?=\s|$)|!(?=\s+[A-Z]|\s*$)|\n")
_SCALE = "dozen|hundred|thousand|million|billion|trillion|万|亿"
_MINUS = "-\u2212"
_DASH = "-\u2212\u2013\u2014~"
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"(?:(?<![\w.)}}\]\u2212-])[{_MINUS}]\s?)?(?:\\?[$€£¥])?"
    rf"(?:\\[dt]?frac\s?\{{-?\d{{1,50}}\}}\s?\{{\d{{1,50}}\}}"
    rf"|\d{{1,50}} \d{{1,50}}/\d{{1,50}}(?![\d.])|\d{{1,2}}:\d\d(?!\d)"
    rf"|(?:{_DIGITS})(?:[eE][-+]?\d+(?!\w)|\s?(?:\\times|\u00d7|\*)\s?10\s?\^\s?\{{?[-+\u2212]?\d{{1,3}}\}}?)?(?:/\d+(?![\d.]))?)"
    rf"(?:\s?\\?%|\s?(?:{_SCALE})(?![A-Za-z]))?"
)
_UNIT = re.compile(
    r"\s?((?:[ap]\.m\.|[AaPp][Mm])(?!\w)|[A-Za-z°€¢\u4e00-\u9fff][A-Za-z°²³\u4e00-\u9fff]*(?:\^\{?[23]\}?)?(?:\s?/\s?[A-Za-z]+)?)"
)
_OPERATORS_BEFORE = ("+", "*", "/", "^", "_", "{", "\\", "±", "\u00d7", "÷", "√", "\\cdot", "\\times", "\\div", "\\pm", "\\sqrt", "\\frac")
_FORMULA_AFTER = re.compile(
    rf"\s*(?:[+^_!\u00d7÷·{{}}]|\*(?!\*)|\*\*(?=\w)|/\s*[\w\\(]|\\(?!%|,|\)|\]|text|mathrm|[ ;])|\([A-Za-z0-9]"
    rf"|[{_DASH}]\s?[\d\\(]|[{_DASH}]\s?[A-Za-z](?![A-Za-z]))"
)
"""Continuation that makes a number a part of a formula."""
_BOLD = re.compile(r"(?<![\w)])\s*\*\*$")
_WORDS_TOO = ("in", "A", "C", "F", "K", "B", "l", "min", "second", "mi", "day")
"""Units that a sentence may go on with."""
_NUMBERING = re.compile(r"[.)]\s")


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` or `\fbox{...}`; None if there is no box or it is never
    closed."""
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
    r"""The last number, with its sign, scale and unit; None where it is only a part of a formula, of a range or of a point.

    Digits with thousands separators, a decimal, `a/b`, `7 3/4`, `\frac{a}{b}`, `1.5 million`, with $ or %. Digits within a word and the
    numbers of a list's lines are none.
    """
    found = reversed(list(_NUMBER.finditer(text)))
    last = next((match for match in found if not _is_in_word(text, match.start()) and not _is_numbering(text, match)), None)
    if last is None or _is_part(text, last):
        return None
    number = last.group()
    start = text.rfind("\n", 0, last.start()) + 1
    if number[0] in _MINUS and number[1:2].isspace() and not _takes_sign(text[start : last.start()]):
        number = number[1:].lstrip()  # a list's dash
    if number.startswith("$") and text[last.end() : last.end() + 1] == "$":
        return number[1:]  # a formula's marks
    return number + _unit_after(text, last)


def _is_in_word(text: str, start: int) -> bool:
    return start > 0 and text[start - 1].isalpha() and text[start - 1].isascii()


def _is_numbering(text: str, match: re.Match[str]) -> bool:
    """True if the number only counts a line: `2. Then ...`."""
    after = _NUMBERING.match(text, match.end())
    if after is None or not match.group().isdigit() or not text[after.end() : after.end() + 1].strip():
        return False
    return not text[text.rfind("\n", 0, match.start()) + 1 : match.start()].strip(" *#")


def _takes_sign(before: str) -> bool:
    """True if a dash and a space after this text are a minus: `x = - 5`."""
    return before.rstrip()[-1:] in tuple("=(,:<>≈[{$") and before.strip() != ""


def _is_part(text: str, match: re.Match[str]) -> bool:
    before, start = text[max(0, match.start() - 40) : match.start()].rstrip(" "), match.start()
    if (before.endswith(_OPERATORS_BEFORE) and not _BOLD.search(before)) or _FORMULA_AFTER.match(text, match.end()):
        return True
    if re.search(rf"[\d%][{_DASH}]\Z|\d\s+[{_DASH}]\Z|\d\s+to\Z|between\s+\S+\s+and\Z", before):
        return True
    if match.group()[0] in _MINUS and re.search(r"[\w)}\]][ \t]*\Z", text[max(0, start - 3) : start]) and match.group()[1:2].isspace():
        return True
    return re.search(r"[(\[][^()\[\]]*,\Z", before) is not None and re.match(r"\s*[)\]]", text[match.end() : match.end() + 5]) is not None


def _unit_after(text: str, match: re.Match[str]) -> str:
    """A unit that follows, or letters that make the number a term: `5 km`, `3x`."""
    unit = _UNIT.match(text, match.end())
    if unit is None:
        return ""
    attached = not unit.group()[0].isspace()
    known = is_known(unit.group(1)) and (attached or unit.group(1) not in _WORDS_TOO)
    return unit.group() if known or unit.group(1)[1:2] in (".", "m", "M") or (attached and text[match.end()].isalpha()) else ""


def stated_answer(text: str) -> str | None:
    """The text after the last "answer is" or "answer:": the formula if it is marked as one, else the
    rest of the sentence."""
    last = None
    for match in _STATED.finditer(text):
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
    """The last box; without any box, the text after the last `####`; else the text after "answer is";
    else the last number."""
    if _BOX.search(text):
        return last_boxed(text)
    for strategy in (after_hash, stated_answer, last_number):
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
