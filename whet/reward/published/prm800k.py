# ruff: noqa: SIM905
r"""The answer comparison of PRM800K (Lightman et al., arXiv 2305.20050): spelled alike as in MATH, or equal after stricter reading.

It is stricter than mathematics on purpose: a whole number wants a whole number, a fraction the same reduced form, `10^3` is not `1000`,
and a formula of more than two letters is compared as text. Where a difference has to be
computed, the two formulas are read by whet's own grammar (`whet.reward.math.arithmetic`) and subtracted in a worker.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from whet.reward.math.arithmetic import Tree, parse_formula
from whet.reward.math.grammar import Refused
from whet.reward.published.hendrycks import respell, unwrap_text
from whet.reward.published.latex_text import plain_text

_UNITS = "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard".split()
_UNIT_PATTERNS = {unit: re.compile(rf"{unit}(?:es)?s? *(?:\^[0-9]+)?") for unit in (*_UNITS, "liter")}
_SCALES = (("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12"))
_THOUSANDS = re.compile(r"(\d),(\d\d\d)($|\D)")
_MIXED = re.compile(r"([0-9]) +([0-9])")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_POWERS = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]+")
_BRACKETS = "()[]"
MAX_LETTERS = 2
"""Different letters in a difference that is computed; more is taken for words."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of a comparison of texts, or the differences that are left to compute."""

    equal: bool
    differences: tuple[tuple[Tree, Tree], ...] = ()
    """All of them zero: equal after all. Empty: `equal` is final."""
    reason: str = ""


def respell_answer(text: str) -> str:
    r"""The spelling of MATH, without `\text{...}` around the whole; a text that cannot be respelled stays as it is."""
    text = unwrap_text(text.strip())
    try:
        return respell(text.strip())
    except ValueError:
        return text.strip()


def normalise_answer(text: str, *, more_units: bool = False, keep_spaces: bool = False) -> str:
    """A plain, lower-case text without units, currency and white space, in which a whole number has one form.

    `more_units` drops litres too, `keep_spaces` keeps spaces and braces: the two points in which PRIME's copy differs.
    """
    text = unwrap_text(text)
    for old, new in (("\\%", ""), ("\\$", ""), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , "), *_SCALES):
        text = text.replace(old, new)
    for unit, pattern in _UNIT_PATTERNS.items():
        text = pattern.sub("", text) if more_units or unit != "liter" else text
    text = re.sub(r"\^ *\\circ", "", text)
    if text and text[0] == "{" and text[-1] == "}":
        text = text[1:-1]
    text = re.sub(r",\\! *", "", text)
    if _is_whole(text):
        text = str(round(float(text)))
    if "\\" in text:
        text = plain_text(text)
    text = _MIXED.sub(r"\1+\2", re.sub(r"- *", "-", text))
    if not keep_spaces:
        text = text.replace(" ", "").replace("{", "").replace("}", "")
    text = text.lower()
    return str(int(float(text.replace(",", "")))) if _is_whole(strip_thousands(text)) else text


def decide(answer: str, label: str, *, more_units: bool = False, keep_spaces: bool = False) -> Decision:
    """Compare as PRM800K does, short of computing: equal, different, or these differences have to be zero."""
    if respell_answer(answer) == respell_answer(label):
        return Decision(True)
    return decide_normalised(
        normalise_answer(answer, more_units=more_units, keep_spaces=keep_spaces),
        normalise_answer(label, more_units=more_units, keep_spaces=keep_spaces),
    )


def decide_normalised(answer: str, label: str) -> Decision:
    """The stricter half of `decide`, on two texts of `normalise_answer`."""
    if answer == label:
        return Decision(True)
    if not answer:
        return Decision(False, reason="the answer is empty")
    answers, labels = split_tuple(answer), split_tuple(label)
    if len(answers) != len(labels):
        return Decision(False, reason=f"the answer has {len(answers)} parts, the label {len(labels)}")
    if len(labels) > 1 and (answer[0], answer[-1]) != (label[0], label[-1]):
        return Decision(False, reason="the brackets differ")
    differences: list[tuple[Tree, Tree]] = []
    for one, other in zip(answers, labels, strict=True):
        if _FRACTION.search(one) and _FRACTION.search(other):
            if one != other:
                return Decision(False, reason="fractions have to agree in their form")
        elif _is_whole(strip_thousands(one)) != _is_whole(strip_thousands(other)):
            return Decision(False, reason="only one of the two is written as a whole number")
        else:
            difference = f"({other})-({one})"
            letters = {letter for letter in difference.replace("sqrt", "").replace("frac", "") if letter.isalpha()}
            if len(letters) > MAX_LETTERS or _POWERS.search(difference):
                return Decision(False, reason="it has too many letters, or a power of more than one digit, to be computed")
            try:
                differences.append((parse_formula(one), parse_formula(other)))
            except Refused as reason:
                return Decision(False, reason=f"it is not compared as a formula: {reason}")
    return Decision(not differences, tuple(differences))


def split_tuple(text: str) -> list[str]:
    """The parts of a bracketed list without inner brackets; commas within large numbers do not part."""
    text = strip_thousands(text)
    if len(text) > 2 and text[0] in _BRACKETS and text[-1] in _BRACKETS and not any(mark in text[1:-1] for mark in _BRACKETS):
        return [part.strip() for part in text[1:-1].split(",")]
    return [text] if text else []


def strip_thousands(text: str) -> str:
    """Without the commas that part thousands."""
    while (shorter := _THOUSANDS.sub(r"\1\2\3", text)) != text:
        text = shorter
    return text


def _is_whole(text: str) -> bool:
    """True if the text is a number within 1e-7 of a whole one."""
    try:
        number = float(text)
        return abs(number - round(number)) <= 1e-7
    except (ValueError, OverflowError):
        return False
