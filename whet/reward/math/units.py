"""Units of measure as people and models write them: `cm^2`, `square centimeters`, `km/h`, `p.m.`, `元`.

Two units agree if they are of one dimension; then their factors convert exactly. A word that is no unit (`apples`) is a dimension of its
own.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

MAX_UNIT = 60
"""Characters of a unit."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: a dimension, and its size in the dimension's own units."""

    dimension: str
    factor: Fraction = Fraction(1)


def _table(dimension: str, *rows: tuple[str, str | int]) -> dict[str, Unit]:
    return {name: Unit(dimension, Fraction(factor)) for names, factor in rows for name in names.split()}


_WORDS: dict[str, Unit] = {
    **_table(
        "length", ("meter metre 米 公尺", 1), ("kilometer kilometre 千米 公里", 1000), ("centimeter centimetre 厘米 公分", "1/100"),
        ("millimeter millimetre 毫米", "1/1000"), ("decimeter decimetre 分米", "1/10"), ("micrometer micron 微米", "1/1000000"),
        ("nanometer 纳米", "1/1000000000"), ("inch", "254/10000"), ("foot feet", "3048/10000"), ("yard yd", "9144/10000"),
        ("mile", "1609344/1000"),
    ),
    **_table(
        "time", ("second sec 秒 秒钟", 1), ("minute min 分钟", 60), ("hour hr 小时", 3600), ("day 天 日", 86400), ("week 周 星期", 604800),
        ("millisecond", "1/1000"),
    ),
    **_table("month", ("month 个月", 1), ("year yr 年", 12), ("decade", 120), ("century", 1200)),
    **_table("mass", ("gram gramme 克", 1), ("kilogram kilo 千克 公斤", 1000), ("milligram 毫克", "1/1000"),
        ("tonne 吨", 10**6), ("斤", 500)),
    **_table("pound", ("pound lb", 1), ("ounce oz", "1/16")),
    **_table("volume", ("liter litre 升", 1), ("milliliter millilitre 毫升", "1/1000"), ("gallon gal", "3785411784/1000000000")),
    **_table("dollar", ("dollar usd buck $", 1), ("cent ¢", "1/100")),
    **_table("euro", ("euro eur € 欧元", 1)),
    **_table("pound sterling", ("£ gbp", 1), ("pence penny", "1/100")),
    **_table("yuan", ("yuan rmb cny 元 块", 1), ("角", "1/10")),
    **_table("yen", ("yen jpy", 1)),
    **_table("¥", ("¥", 1)),
    **_table("rupee", ("rupee ₹ inr", 1)),
    **_table("degree", ("degree deg ° 度", 1)),
    **_table("radian", ("radian rad", 1)),
    **_table("ordinal", ("st nd rd th", 1)),
    **_table("joule", ("joule", 1), ("kilojoule", 1000)),
    **_table("watt", ("watt", 1), ("kilowatt", 1000)),
    **_table("newton", ("newton", 1)),
}  # fmt: skip
"""Looked up in lower case, without a plural's `s`."""
_SYMBOLS: dict[str, Unit] = {
    **_table("length", ("m", 1), ("km", 1000), ("cm", "1/100"), ("mm", "1/1000"), ("dm", "1/10"), ("nm", "1/1000000000"),
             ("ft", "3048/10000"), ("in", "254/10000"), ("mi", "1609344/1000")),
    **_table("time", ("s", 1), ("ms", "1/1000"), ("h", 3600)),
    **_table("mass", ("g", 1), ("kg", 1000), ("mg", "1/1000")),
    **_table("pound", ("lb lbs", 1)),
    **_table("volume", ("L l", 1), ("mL ml", "1/1000")),
    **{f"{prefix}{name}": Unit(word, Fraction(factor))
       for name, word in (("J", "joule"), ("W", "watt"), ("N", "newton"), ("Hz", "hertz"), ("Pa", "pascal"), ("V", "volt"), ("A", "ampere"),
                          ("K", "kelvin"), ("mol", "mole"), ("eV", "electronvolt"), ("C", "C"), ("F", "F"), ("B", "byte"))
       for prefix, factor in (("", 1), ("k", 1000), ("M", 10**6), ("m", "1/1000"))},
}  # fmt: skip
"""Looked up as they stand: `mm` is not `Mm`."""
LONE_LETTERS = frozenset(name for name in _SYMBOLS if len(name) == 1)
"""Units that may be variables, too: `5 m`."""
MARKS = "$€£¥₹¢°"
_POWER_WORDS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_RATES = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour"}
_FACTOR = re.compile(r"([^\W\d]+|[$€£¥₹¢°])\s*(?:\^?\s*\{?\s*(-?[1-9])\s*\}?)?")
_PREFIXED = re.compile(r"(square|sq\.?|cubic|cu\.?)\s+([A-Za-z]+)")


@functools.lru_cache(maxsize=4096)
def parse_unit(text: str) -> Unit:
    """The unit that a text names; an unknown unit gets its own dimension."""
    text = " ".join(text.strip(" .").split())
    if text.lower().replace(".", "") in _RATES:
        text = _RATES[text.lower().replace(".", "")]
    known = _product(text)
    return known if known is not None else Unit("?" + " ".join(_singular(word) for word in text.lower().split()))


def is_known(text: str) -> bool:
    """True if a text is a unit of the tables, or a product of such units."""
    return not parse_unit(text).dimension.startswith("?")


def _product(text: str) -> Unit | None:
    text = _PREFIXED.sub(lambda match: f"{match.group(2)}^{_POWER_WORDS[match.group(1).rstrip('.')]}", text)
    text = text.replace(" per ", "/").replace("\\cdot", "*")
    dimensions: dict[str, int] = {}
    factor, sign, place = Fraction(1), 1, 0
    while place < len(text):
        if text[place] in "/* ":
            sign = -1 if text[place] == "/" else sign
            place += 1
            continue
        match = _FACTOR.match(text, place)
        unit = _lookup(match.group(1)) if match else None
        if match is None or unit is None:
            return None
        power = sign * int(match.group(2) or 1)
        for name in unit.dimension.split("·"):
            dimensions[name] = dimensions.get(name, 0) + power
        factor *= unit.factor**power
        place = match.end()
    if dimensions == {"length": 3} or dimensions == {"volume": 1}:
        return Unit("volume^1", factor * (1000 if "length" in dimensions else 1))
    return Unit("·".join(f"{name}^{power}" for name, power in sorted(dimensions.items()) if power), factor) if dimensions else None


def _lookup(name: str) -> Unit | None:
    if name in _SYMBOLS:
        return _SYMBOLS[name]
    word = name.lower()
    return _WORDS.get(word) or _WORDS.get(_singular(word))


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    return word[:-1] if word.endswith("s") and len(word) > 2 and not word.endswith("ss") else word
