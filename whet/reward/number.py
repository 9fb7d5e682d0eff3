r"""Numbers as people and models write them, read exactly: no float, so no rounding and no tolerance.

`0.5`, `1/2` and `\frac{1}{2}` are equal; `0.333` and `1/3` are not. A percentage equals both its figure and its
value: `50\%` is `50` (data sets drop the sign) and `0.5`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 400
"""Of the text of a number; a longer one is none."""

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_POWER_OF_TEN = r"\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?([-+]?\d{1,3})\}?"
_SCIENTIFIC = re.compile(rf"({_PLAIN})(?:[eE]([-+]?\d{{1,3}})|{_POWER_OF_TEN})")
_RATIO = re.compile(rf"({_PLAIN})\s*/\s*({_PLAIN})")
_FRAC = re.compile(r"(\d*)\s*\\frac\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))\s*(?:\{\s*(-?[\d.,]+)\s*\}|(\d))")
_MIXED = re.compile(r"(\d+)\s+(\d+)\s*/\s*(\d+)")
_UNIT = re.compile(
    r"(.*?[\d.}])(?:\s+([A-Za-z]{2,}(?:[ -][A-Za-z]+)*)|\s*\\(?:text|mathrm|textbf)\s*\{([A-Za-z .-]*)\})\.?"
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction
    percent: bool = False
    unit: str = ""

    def equals(self, other: Number) -> bool:
        """Same value; a unit counts only where both name one."""
        if self.unit and other.unit and self.unit != other.unit:
            return False
        if self.percent == other.percent:
            return self.value == other.value
        percent, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percent.value, percent.value / 100)


def parse_number(text: str) -> Number | None:
    """The number that the whole of a normalised text is, or None."""
    if len(text) > MAX_LENGTH:
        return None
    unit = ""
    match = _UNIT.fullmatch(text)
    if match:
        text, unit = match.group(1), (match.group(2) or match.group(3) or "").strip(" .").lower()
    factor = 1
    first, _, rest = unit.partition(" ")
    if first in _SCALES:
        factor, unit = _SCALES[first], rest
    percent = unit.startswith("percent")
    unit = "" if percent else unit
    negative, body = _sign(text)
    if body.endswith("%"):
        percent, body = True, body.rstrip("\\%").rstrip()
    value = _unsigned(body)
    if value is None:
        return None
    return Number((-value if negative else value) * factor, percent, unit)


def _sign(text: str) -> tuple[bool, str]:
    """Whether it is negative, and the text without its sign and currency mark (`-$5`, `$-5`)."""
    body = text.lstrip("$ ")
    negative = body.startswith("-")
    return negative, (body[1:] if body[:1] in ("-", "+") else body).lstrip("$ ")


def _unsigned(text: str) -> Fraction | None:
    if re.fullmatch(_PLAIN, text):
        return _decimal(text)
    if match := _SCIENTIFIC.fullmatch(text):
        return _decimal(match.group(1)) * Fraction(10) ** int(match.group(2) or match.group(3))
    if match := _RATIO.fullmatch(text):
        return _divide(_decimal(match.group(1)), _decimal(match.group(2)))
    if match := _MIXED.fullmatch(text):
        part = _divide(Fraction(match.group(2)), Fraction(match.group(3)))
        return None if part is None else int(match.group(1)) + part
    if match := _FRAC.fullmatch(text):
        return _latex_fraction(match)
    return None


def _latex_fraction(match: re.Match[str]) -> Fraction | None:
    over, under = match.group(2) or match.group(3), match.group(4) or match.group(5)
    signs, digits = over.count("-") + under.count("-"), (over.lstrip("-"), under.lstrip("-"))
    if not all(re.fullmatch(_PLAIN, part) for part in digits):
        return None
    part = _divide(_decimal(digits[0]), _decimal(digits[1]))
    if part is None or (match.group(1) and signs):
        return None
    return int(match.group(1) or 0) + (-part if signs == 1 else part)


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip("."))


def _divide(over: Fraction, under: Fraction) -> Fraction | None:
    return over / under if under else None
