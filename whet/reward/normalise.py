"""One spelling for the many ways to typeset the same answer. Text in, text out; nothing is evaluated."""

from __future__ import annotations

import re

_UNICODE = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ",  # noqa: RUF001
        "≥": r"\geq ", "≠": r"\neq ", "°": "", "²": "^2", "³": "^3", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",  # noqa: RUF001
        "θ": r"\theta ", "½": r"\frac{1}{2}", "\u00a0": " ", "\u202f": " ", "’": "'", "，": ",",  # noqa: RUF001
    }
)  # fmt: skip
_REPLACEMENTS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\left\s*\.|\\right\s*\.|\\left(?![a-z])|\\right(?![a-z])", ""),
        (r"\\(?:displaystyle|limits)(?![A-Za-z])|\\!", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<=\d)(?:\\,|\{,\})(?=\d{3}(?!\d))", ","),
        (r"\\[,;:]|~", " "),
        (r"\\\$", ""),
        (r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])", ""),
        (r"√\s*\(|(?<![A-Za-z\\])sqrt\s*\(", r"\\sqrt("),
        (r"√\s*(\d+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])(pi|infty|sin|cos|tan|log|ln|exp)(?![A-Za-z])", r"\\\1 "),
        (r"\*\*", "^"),
        (r"\s+", " "),
    )
]
_WRAPPED = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$+([^$]*)\$+",
        r"\\\((.*)\\\)",
        r"\\\[(.*)\\\]",
        r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}",
    )
]


def normalise(text: str) -> str:
    r"""The answer without delimiters, spacing commands, `\left`, `\right`, degree signs and a full stop at its end."""
    text = text.translate(_UNICODE)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = _braced_roots(text)
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
