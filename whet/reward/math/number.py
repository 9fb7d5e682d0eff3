r"""Numbers as people and models write them, read exactly: no float, so no rounding and no tolerance.

`0.5`, `1/2` and `\frac{1}{2}` are equal; `0.333` and `1/3` are not, `0.\overline{3}` and `1/3` are. A percentage equals both its figure and
its value: `50\%` is `50` (data sets drop the sign) and `0.5`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from whet.reward.math.units import LONE_LETTERS, MARKS, MAX_UNIT, Unit, is_known, parse_unit

MAX_LENGTH = 400
"""Length limit of a number's text; a longer text is no number."""

_GROUPED = (
    r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d*)?"  # 1,234.5
    r"|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)(?:\.\d+)?"  # 12,34,567 (Indian)
    r"|\d{1,3}(?:'\d{3})+(?!\d)(?:\.\d+)?"  # 1'234 (Swiss)
    r"|\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?![\d,])"  # 1.234,5 and 1.234.567 (continental)
    r"|\d{1,3}(?: \d{3})+(?! ?\d)(?! ?/)(?:\.\d+)?"  # 1 234.5 (SI)
)
_PLAIN = rf"(?:{_GROUPED}|\d+(?:\.\d*)?|\.\d+)"
_NUMERAL = re.compile(
    rf"(?P<repeat>\d*\.\d*(?:\\(?:overline|bar|dot)\s*\{{\d+\}}|\(\d+\)))"
    rf"|(?P<mixed>\d+)(?:\s+(?P<mover>\d+)\s*/\s*(?P<munder>\d+)|\s*\\frac\s*(?:\{{\s*(?P<mfover>\d+)\s*\}}|(?P<mfo>\d))\s*"
    rf"(?:\{{\s*(?P<mfunder>\d+)\s*\}}|(?P<mfu>\d)))"
    rf"|\\frac\s*(?:\{{\s*(?P<fover>-?\s*[\d.,]+)\s*\}}|(?P<fo>\d))\s*(?:\{{\s*(?P<funder>-?\s*[\d.,]+)\s*\}}|(?P<fu>\d))"
    rf"|(?P<over>{_PLAIN})\s*/\s*(?P<under>{_PLAIN})"
    rf"|(?P<plain>{_PLAIN})(?:[eE](?P<exp>[-+]?\d{{1,3}})(?![\dA-Za-z])"
    rf"|\s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*(?:\{{\s*(?P<power>[-+]?\d{{1,3}})\s*\}}|(?P<bare>[-+]?\d{{1,3}})))?"
)
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "十": 10, "百": 100, "千": 1000, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_SCALE = re.compile(
    r"(?:(dozen|hundred|thousand|million|billion|trillion)s?(?![A-Za-z])|(百万|千万|万亿|[十百千万亿](?!\s*[克米瓦分])))\s*"
)
_PERCENT = re.compile(r"\\?%|percent(?:age)?(?: points?)?(?![a-z])|per cent(?![a-z])", re.IGNORECASE)
_WRAPPED_UNIT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textrm)\s*\{([^{}]*)\}(\s*\^\s*\{?\s*-?[23]\s*\}?)?")
_WORD_UNIT = re.compile(
    r"(?:[^\W\d_]|[$€£¥₹¢°])(?:[^\W\d_]|[ ./^{}-]|(?<=\^)[23]|(?<=\{)-?[1-9]|(?<=[A-Za-z])[23](?![\d]))*"
)
_CURRENCY_NAMES = re.compile(r"(US|USD|EUR|GBP|RMB|CNY|INR)(?=[\s$\d])\s*")
_TEMPERATURE = re.compile(r"(?:\\degree|°|degrees?)\s*(C|F|celsius|fahrenheit)(?![a-z])", re.IGNORECASE)
_CHINESE_DIGITS = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"\u3007": 0, "两": 2}
_CHINESE_PLACES = {"十": 10, "百": 100, "千": 1000}
_CHINESE = re.compile(r"[零一二三四五六七八九\u3007两十百千万亿]+")
_CHINESE_PERCENT = re.compile(r"百分之(.+)")


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction
    percent: bool = False
    unit: Unit | None = None

    def equals(self, other: Number) -> bool:
        """Same value; a unit counts only where both name one, and is converted where it can be. `0.5` is not `0.5%`."""
        one, two = self.value, other.value
        if self.unit and other.unit:
            if self.unit.dimension != other.unit.dimension:
                return False
            one, two = one * self.unit.factor, two * other.unit.factor
        if self.percent == other.percent:
            return one == two
        if self.unit or other.unit:
            return False
        percent, plain = (one, two) if self.percent else (two, one)
        return plain == percent / 100 or (abs(percent) >= 1 and plain == percent)


def parse_number(text: str, *, lone_letters: bool = False) -> Number | None:
    """The number that the whole of a normalised text is, or None. `lone_letters`: a letter after it may be a unit (`5 m`)."""
    if len(text) > MAX_LENGTH:
        return None
    if match := _CHINESE_PERCENT.fullmatch(text):
        inner = parse_number(match.group(1))
        return Number(inner.value, percent=True) if inner and not inner.percent and not inner.unit else None
    negative, mark, body = _sign(text)
    match = _NUMERAL.match(body)
    value = _value(match) if match else None
    if match is None or value is None:
        return _chinese_number(text)
    rest = body[match.end() :]
    suffix = _suffix(rest, lone_letters)
    if suffix is None:
        return _sum_of_quantities(text)
    factor, percent, unit = suffix
    if mark and (percent or (unit and unit.dimension != parse_unit(mark).dimension)):
        return None
    unit = parse_unit(mark) if mark and not unit else unit
    return Number((-value if negative else value) * factor, percent, unit)


def _sign(text: str) -> tuple[bool, str, str]:
    """Sign (True: negative), currency mark, and the text without both (`-$5`, `$-5`, `USD 5`)."""
    body, negative, mark = text.strip(), False, ""
    for _ in range(2):
        if body[:1] in ("-", "+"):
            negative, body = negative or body[0] == "-", body[1:].lstrip()
        if name := _CURRENCY_NAMES.match(body):
            mark, body = "usd" if name.group(1) == "US" else name.group(1).lower(), body[name.end() :]
        if body[:1] and body[0] in MARKS and body[0] != "°":
            mark, body = mark or body[0], body[1:].lstrip()
    return negative, mark, body


def _value(match: re.Match[str]) -> Fraction | None:
    if text := match.group("repeat"):
        return _repeating(text)
    if whole := match.group("mixed"):
        over = match.group("mover") or match.group("mfover") or match.group("mfo")
        under = match.group("munder") or match.group("mfunder") or match.group("mfu")
        part = _divide(Fraction(over), Fraction(under))
        return None if part is None else int(whole) + part
    if over := match.group("fover") or match.group("fo"):
        return _divide(_signed_decimal(over), _signed_decimal(match.group("funder") or match.group("fu")))
    if over := match.group("over"):
        return _divide(_decimal(over), _decimal(match.group("under")))
    exponent = match.group("exp") or match.group("power") or match.group("bare")
    value = _decimal(match.group("plain"))
    return value if value is None or not exponent else value * Fraction(10) ** int(exponent)


def _repeating(text: str) -> Fraction | None:
    whole, _, digits = text.partition(".")
    fixed, _, block = re.sub(r"\\(?:overline|bar|dot)\s*|[})]", "", digits).replace("{", "(").partition("(")
    shift = 10 ** len(fixed)
    return Fraction(whole or 0) + Fraction(int(fixed or 0), shift) + Fraction(int(block), (10 ** len(block) - 1) * shift)


def _signed_decimal(text: str) -> Fraction | None:
    text = text.replace(" ", "")
    value = _decimal(text.lstrip("-")) if re.fullmatch(rf"-?{_PLAIN}", text) else None
    return -value if value is not None and text.startswith("-") else value


def _decimal(text: str) -> Fraction | None:
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}", text):
        text = text.replace(".", "").replace(",", ".")
    return Fraction(re.sub(r"[,' ]", "", text).rstrip(".") or "0")


def _divide(over: Fraction | None, under: Fraction | None) -> Fraction | None:
    return over / under if over is not None and under else None


def _suffix(text: str, lone_letters: bool) -> tuple[int, bool, Unit | None] | None:
    """The scale, the percent sign and the unit that follow a number; None if the text is something else."""
    spaced, text = text[:1].isspace() or text[:1] in "\\-", text.strip().removeprefix("-")
    wrapped = _WRAPPED_UNIT.fullmatch(text)
    if wrapped:
        text, spaced = (wrapped.group(1) + (wrapped.group(2) or "").replace(" ", "")).strip(" .-"), True
    factor = 1
    while scale := _SCALE.match(text):
        word = scale.group(1) or scale.group(2)
        for part in (word,) if word in _SCALES else tuple(word):
            factor *= _SCALES[part]
        text, spaced = text[scale.end() :], True
    text = text.removeprefix("of ").strip()
    if not text:
        return factor, False, None
    if percent := _PERCENT.match(text):
        rest = text[percent.end() :].strip()
        return (factor, True, None) if not rest else None
    unit = _unit(text, spaced or bool(wrapped), bool(wrapped), lone_letters)
    return None if unit is None else (factor, False, unit)


def _unit(text: str, spaced: bool, wrapped: bool, lone_letters: bool) -> Unit | None:
    if temperature := _TEMPERATURE.fullmatch(text):
        return Unit("celsius" if temperature.group(1)[0] in "cC" else "fahrenheit")
    text = re.sub(r"\\degree(?![A-Za-z])", "°", text.replace("\\cdot", "*")).strip()
    text = re.sub(r"\^\s*\{?\s*(st|nd|rd|th)\s*\}?", r"\1", text)
    if len(text) > MAX_UNIT or not (wrapped or _WORD_UNIT.fullmatch(text)):
        return None
    if len(text) == 1 and text in LONE_LETTERS and not wrapped:
        return parse_unit(text) if lone_letters else None
    if is_known(text) or (wrapped and re.fullmatch(r"[^\W\d_][\w .'-]*", text)):
        return parse_unit(text)
    words = text.split()
    plain = all(re.fullmatch(r"[A-Za-z]+(?:-[A-Za-z]+)*\.?", word) for word in words) and re.search(r"[aeiouy]", text, re.IGNORECASE)
    return parse_unit(text) if (spaced and ((plain and len(words[0]) > 2) or not text.isascii())) or not text[0].isascii() else None


def _sum_of_quantities(text: str) -> Number | None:
    """`5 feet 3 inches`, `1 hour and 30 minutes`: the larger unit first, of one dimension."""
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+|[^\W\da-zA-Z_]+)\.?(?:\s+and)?[\s,]*", text)
    if not 2 <= len(parts) <= 4 or re.sub(r"\W", "", "".join(a + b for a, b in parts)) != re.sub(r"\W|\band\b", "", text):
        return None
    if not all(is_known(unit) for _, unit in parts):
        return None
    units = [parse_unit(unit) for _, unit in parts]
    if len({unit.dimension for unit in units}) > 1 or any(a.factor <= b.factor for a, b in pairwise(units)):
        return None
    total = sum((Fraction(value) * unit.factor for (value, _), unit in zip(parts, units, strict=True)), Fraction(0))
    return Number(total / units[-1].factor, unit=units[-1])


def _chinese_number(text: str) -> Number | None:
    match = _CHINESE.match(text)
    value = _chinese_value(match.group()) if match else None
    if match is None or value is None:
        return None
    rest = text[match.end() :].strip()
    if rest and not re.fullmatch(r"[^\W\d_a-zA-Z]{1,4}", rest):
        return None
    return Number(Fraction(value), unit=parse_unit(rest) if rest else None)


def _chinese_value(text: str) -> int | None:
    """The value of a numeral in Chinese characters; None for one that is not well formed."""
    if all(c in _CHINESE_DIGITS for c in text):
        digits = "".join(str(_CHINESE_DIGITS[c]) for c in text)
        return int(digits) if len(text) == 1 or "0" in digits else None
    for mark, scale in (("亿", 10**8), ("万", 10**4)):
        head, found, tail = text.partition(mark)
        if found:
            over, under = _chinese_value(head) if head else None, _chinese_value(tail.lstrip("零")) if tail else 0
            return None if over is None or under is None or under >= scale else over * scale + under
    total, digit, limit = 0, None, 10**4
    for character in text:
        if character in _CHINESE_PLACES:
            place = _CHINESE_PLACES[character]
            if place >= limit or (digit is None and place != 10):
                return None
            total, digit, limit = total + (1 if digit is None else digit) * place, None, place
        elif character == "零":
            continue
        elif digit is not None:
            return None
        else:
            digit = _CHINESE_DIGITS[character]
    return total + (digit or 0)
