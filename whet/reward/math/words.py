# ruff: noqa: SIM905
"""Answers that are no formulas: choices, dates, times of day, numerals of other bases, ranges, ratios, words."""

from __future__ import annotations

import re
from typing import Literal

from whet.reward.math.grammar import Refused

PlainKind = Literal["words", "choice", "date", "time", "base", "range", "ratio"]
Plain = tuple[PlainKind, tuple[str | int | None, ...]]

_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textsc|underline)\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"[(\[]?([A-J])[)\].:]?|[(\[]([A-J])[)\]][.:]?\s+\S.*", re.DOTALL)
_CHOICE_WITH_TEXT = re.compile(r"([A-J])[).:]\s+\S.*", re.DOTALL)
_MONTHS = "january february march april may june july august september october november december".split()
_MONTH = rf"({'|'.join(month + '|' + month[:3] for month in _MONTHS)}|sept)\.?"
_DAY, _YEAR = r"(\d{1,2})(?:st|nd|rd|th)?", r"(\d{3,4})"
_DATES = (
    (re.compile(rf"{_MONTH}\s+{_DAY}(?:\s*,?\s*{_YEAR})?", re.IGNORECASE), "mdy"),
    (re.compile(rf"(?:the\s+)?{_DAY}(?:\s+of)?\s+{_MONTH}(?:\s*,?\s*{_YEAR})?", re.IGNORECASE), "dmy"),
    (re.compile(r"(\d{4})-(\d{1,2})-(\d{1,2})"), "ymd"),
    (re.compile(r"(?:(\d{3,4})年)?(\d{1,2})月(\d{1,2})[日号]"), "ymd"),
)
_TIME = re.compile(r"(\d{1,2})(?:\s*:\s*([0-5]\d)(?:\s*:\s*([0-5]\d))?)?\s*(?:\\text\s*\{)?\s*(?:([ap])\.?\s?m\.?)?\s*\}?", re.IGNORECASE)
_BASE = re.compile(r"\(?\s*([0-9A-Za-z]+)\s*\)?\s*_\s*(?:(\d)|\{\s*\(?(\d{1,2}|[a-z]+)\)?\s*\}|\\text\s*\{\s*([a-z]+)\s*\})")
_BASE_NAMES = dict(zip("two three four five six seven eight nine ten eleven twelve".split(), range(2, 13), strict=True)) | {"sixteen": 16}
_RANGE = re.compile(r"(\d+(?:\.\d+)?%?)(?:-|~|\\sim|\s*--\s*|\s+to\s+)(\d+(?:\.\d+)?\s*%?(?:\s*[^\W\d_]{2,}[^\W\d_. ]*)?)")
_RATIO = re.compile(r"\d+(?:\.\d+)?(?:\s*(?::|\\colon)\s*\d+(?:\.\d+)?)+")
_FORMULA_MARKS = re.compile(r"[\\^_=+*<>{}\[\]|$]")
_LETTERS = re.compile(r"[^\W\d_]+")
_PRODUCT = re.compile(r"[a-df-hj-z]{1,3}", re.ASCII)
_SURE_PRODUCT = re.compile(r"(?![a-z]*[eiou])(?!.*a.*[^abcxz])[a-z]{1,3}")
MAX_WORDS = 400
"""Characters of an answer in words."""


def plain_form(text: str) -> Plain | None:
    """The kind of a normalised answer that is no formula, and what of it is compared; None for a formula.

    Raises:
        Refused: it is words, but too many.
    """
    bare = " ".join(_WRAPPER.sub(r"\1", text).split())
    return _choice(bare) or _time(bare) or _base(text) or _range(bare) or _ratio(bare) or _words(text, bare)


def date_of(text: str) -> Plain | None:
    """The date that a normalised answer is, or None."""
    return _date(" ".join(_WRAPPER.sub(r"\1", text).split()))


def choice_with_text(text: str) -> str | None:
    """The letter of `B. Paris` or `B) Paris`; None for anything else."""
    match = _CHOICE_WITH_TEXT.fullmatch(" ".join(_WRAPPER.sub(r"\1", text).split()))
    return match.group(1) if match else None


def _choice(text: str) -> Plain | None:
    match = _CHOICE.fullmatch(text)
    return ("choice", (match.group(1) or match.group(2),)) if match else None


def _date(text: str) -> Plain | None:
    for pattern, order in _DATES:
        if match := pattern.fullmatch(text):
            fields = dict(zip(order, match.groups(), strict=True))
            month = fields["m"].lower()[:3]
            number = int(month) if month.isdigit() else [name[:3] for name in _MONTHS].index(month) + 1
            if 1 <= number <= 12 and 1 <= int(fields["d"]) <= 31:
                return "date", (int(fields["y"]) if fields["y"] else None, number, int(fields["d"]))
    return None


def _time(text: str) -> Plain | None:
    if text.lower() in ("noon", "midnight"):
        return "time", (12 * 3600 if text.lower() == "noon" else 0, "halves")
    match = _TIME.fullmatch(text)
    if match is None or (match.group(2) is None and match.group(4) is None):
        return None
    hour, minute, second = (int(part or 0) for part in match.groups()[:3])
    half = match.group(4).lower() if match.group(4) else None
    if hour > 24 or (half and not 1 <= hour <= 12):
        return None
    hour = hour % 12 + (12 if half == "p" else 0) if half else hour
    clock = "halves" if half else "whole day" if hour > 12 or hour == 0 else "either"
    return "time", ((hour * 60 + minute) * 60 + second, clock)


def _base(text: str) -> Plain | None:
    match = _BASE.fullmatch(text)
    if match is None or not match.group(1)[0].isdigit():
        return None
    name = match.group(2) or match.group(3) or match.group(4)
    base = _BASE_NAMES.get(name, 0) if name.isalpha() else int(name)
    try:
        return ("base", (base, int(match.group(1), base))) if 2 <= base <= 36 and len(match.group(1)) <= 100 else None
    except ValueError:
        return None


def _range(text: str) -> Plain | None:
    match = _RANGE.fullmatch(text)
    return None if match is None else ("range", (match.group(1), " ".join(match.group(2).split()).lower()))


def _ratio(text: str) -> Plain | None:
    return ("ratio", tuple(part.strip() for part in re.split(r":|\\colon", text))) if _RATIO.fullmatch(text) else None


def _words(text: str, bare: str) -> Plain | None:
    """Words in any script: no formula's marks outside of `\\text{}`, and a word that is no product of variables."""
    if _FORMULA_MARKS.search(bare) or is_product(bare):
        return None
    wrapped = bare != " ".join(text.split())
    runs = [run for run in _LETTERS.findall(bare) if (len(run) > 1 or not run.isascii()) and run not in ("and", "or")]
    if not runs or (not wrapped and all(is_product(run) for run in runs)):
        return None
    if not wrapped and not any(len(run) > 3 or not run.isascii() or not is_product(run) for run in runs):
        return None
    if re.search(r"\d\s*/|/\s*\d|[(]\s*\d|'[^']*\(", bare) and not wrapped and len(runs) < 2:
        return None  # more of a formula than of words
    if len(bare) > MAX_WORDS:
        raise Refused(f"it is {len(bare)} characters long; at most {MAX_WORDS} are compared as words")
    return "words", (canonical_words(bare),)


def canonical_words(text: str) -> str:
    """Words without regard to case, white space, quotation marks and a full stop at their end."""
    return " ".join(text.replace("-", " ").strip("\"'` .").split()).casefold()


def is_product(text: str) -> bool:
    """True if letters alone are a product of variables rather than a word: `xy`, `ab`, not `no`."""
    return _SURE_PRODUCT.fullmatch(text) is not None
