"""One spelling for the many ways to typeset the same answer. Text in, text out; nothing is evaluated."""

from __future__ import annotations

import re

_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
_FRACTIONS = {
    "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5), "⅘": (4, 5), "⅙": (1, 6),
    "⅚": (5, 6), "⅐": (1, 7), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8), "⅑": (1, 9), "⅒": (1, 10),
}  # fmt: skip
_UNICODE = str.maketrans(
    {
        **_FULL_WIDTH,
        **{mark: rf"\frac{{{over}}}{{{under}}}" for mark, (over, under) in _FRACTIONS.items()},
        "−": "-", "‐": "-", "‑": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "∗": "*",  # noqa: RUF001
        "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "⩽": r"\leq ", "⩾": r"\geq ", "≠": r"\neq ", "±": r"\pm ",
        "∓": r"\mp ", "°": r"\degree ", "º": r"\degree ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",  # noqa: RUF001
        "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "ω": r"\omega ",  # noqa: RUF001
        "φ": r"\phi ", "\u211d": r"\mathbb{R}", "…": r"\ldots ", "\u00a0": " ", "\u202f": " ", "\u2009": " ", "\u200b": "",
        "\ufeff": "", "’": "'", "‘": "'", "“": '"', "”": '"', "、": ",", "。": ".", "【": "[", "】": "]",  # noqa: RUF001
    }
)  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_DEGREE = r"\\degree "
_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\left\s*\.|\\right\s*\.|\\left(?![a-z])|\\right(?![a-z])|\\[bB]ig+[lr]?(?![a-z])", ""),
        (r"\\(?:displaystyle|limits)(?![A-Za-z])", ""),
        (r"(?<=\d),\s*\\!\s*(?=\d{3}(?!\d))", ","),
        (r"\\!", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"(?<=\d)(?:\\,|\{,\}|\{\\,\})(?=\d{3}(?!\d))", ","),
        (r"(?<!\\)\\[,;: ]|~", " "),
        (r"\\\$", "$"),
        (r"\\(?:mbox|textrm|textit|mathit|textnormal|mathsf|hbox)(?![A-Za-z])", r"\\text"),
        (r"\\textdegree(?![A-Za-z])|\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})", _DEGREE),
        (r"\^\s*\{?\s*\\degree\s*\}?", _DEGREE),
        (r"(?<=\d)\s*\^\s*(?:\{\s*)?(?:\\(?:text|mathrm|rm)\s*\{\s*)?(st|nd|rd|th)(?![A-Za-z])[\s}]*", r"\1 "),
        (r"\\(?:leqslant|leq)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geqslant|geq)(?![A-Za-z])", r"\\ge"),
        (r"\\(?:neq)(?![A-Za-z])", r"\\ne"),
        (r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset"),
        (r"\\(?:land|lor|quad|qquad)(?![A-Za-z])", " "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=(?!=)", r"\\ne "),
        (r"√\s*\(|(?<![A-Za-z\\])sqrt\s*\(", r"\\sqrt("),
        (r"(?<![A-Za-z\\])sqrt\s*\{", r"\\sqrt{"),
        (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])(?:infinity|infty|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"(?<![A-Za-z\\])(pi|sin|cos|tan|log|ln|exp|theta)(?![A-Za-z])", r"\\\1 "),
        (r"\*\*", "^"),
        (r"\s+", " "),
    )
]
_WRAPPED = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$([^$]*)\$\$",
        r"\$([^$]*)\$",
        r"\\\((.*)\\\)",
        r"\\\[(.*)\\\]",
        r"\\(?:text|mathrm|textbf|mathbf|boxed)\s*\{([^{}]*)\}",
        r"\*\*([^*]*)\*\*",
    )
]


def normalise(text: str) -> str:
    r"""The answer without delimiters, spacing commands, `\left`, `\right` and a full stop at its end; degree signs are `\degree`."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda match: f"^{{{match.group().translate(_SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda match: f"_{{{match.group().translate(_SUBSCRIPTS)}}}", text)
    text = text.translate(_UNICODE)
    text = _unwrapped(text)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    return _unwrapped(_braced_roots(text))


def _unwrapped(text: str) -> str:
    while True:
        shorter = text.strip().removesuffix(".").strip()
        for wrapped in _WRAPPED:
            if match := wrapped.fullmatch(shorter):
                shorter = match.group(1)
        if shorter == text:
            return text
        text = shorter


def _braced_roots(text: str) -> str:
    r"""`\sqrt(x+1)` as `\sqrt{x+1}`: LaTeX would take the root of the bracket alone."""
    start = text.find(r"\sqrt(")
    while start >= 0:
        opening, depth = start + len(r"\sqrt"), 0
        for i in range(opening, len(text)):
            depth += (text[i] == "(") - (text[i] == ")")
            if depth == 0:
                text = f"{text[:opening]}{{{text[opening + 1 : i]}}}{text[i + 1 :]}"
                break
        start = text.find(r"\sqrt(", opening)
    return text
