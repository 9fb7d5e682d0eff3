# ruff: noqa: SIM905, RUF001
r"""A LaTeX answer as plain text: `\frac{1}{2}` as `1/2`, `\sqrt{3}` as `sqrt(3)`, `\pi` as `pi`.

The plain text is for comparing, not for computing: a fraction loses its braces, so `\frac{x+1}{2}` is `x+1/2` (the PRM800K grader, which
compares these texts, has it so).
"""

from __future__ import annotations

import re
import unicodedata

MAX_DEPTH = 50
"""Depth limit of braces within braces; deeper ones are dropped, their content is kept."""

_PIECE = re.compile(r"\\(?P<command>[A-Za-z]+\*?|.)[ \t\n]*|(?P<brace>[{}])|(?P<other>[^\\{}]+|\\)", re.DOTALL)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-zA-Z*]*\}")

_SYMBOLS = {
    "pi": "pi", "infty": "inf", "cup": "U", "cdot": "*", "times": "*", "cap": "∩", "in": "∈", "circ": "∘", "pm": "±", "mp": "∓", "div": "÷",
    "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥", "neq": "≠", "approx": "≈", "equiv": "≡", "to": "→", "rightarrow": "→",
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "varepsilon": "ε", "zeta": "ζ", "eta": "η", "theta": "θ",
    "iota": "ι", "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "xi": "ξ", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "ϕ",
    "varphi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ", "Theta": "Θ", "Lambda": "Λ", "Sigma": "Σ", "Phi": "Φ",
    "Psi": "Ψ", "Omega": "Ω", "emptyset": "∅", "varnothing": "∅", "ldots": "…", "dots": "…", "cdots": "⋯", "prime": "'",
    "sum": "∑", "int": "∫", "partial": "∂", "perp": "⊥", "parallel": "∥", "angle": "∠", "subset": "⊂", "setminus": "∖",
    "langle": "⟨", "rangle": "⟩", "lfloor": "⌊", "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "vert": "|", "mid": "|", "lvert": "|",
    "rvert": "|", "Rightarrow": "⇒", "prod": "∏", "ell": "ℓ", "hbar": "ħ", "star": "⋆", "ast": "\u2217", "oplus": "⊕", "otimes": "⊗",
    "wedge": "∧", "vee": "\u2228", "forall": "∀", "exists": "∃", "notin": "∉", "subseteq": "⊆", "supset": "⊃", "sim": "\u223c", "cong": "≅",
    "propto": "∝", "nabla": "∇", "vdots": "⋮", "Pi": "Π", "therefore": "∴", "because": "∵", "square": "□", "blacksquare": "▪",
    "bigcup": "⋃", "bigcap": "⋂", "textdegree": "°",
    "quad": "  ", "qquad": "    ", ",": " ", ";": " ", ":": " ", " ": " ", "\n": " ", "\\": "\n", "!": "",
    **{name: name for name in "sin cos tan csc arcsin arccos arctan sinh cosh tanh ln log exp lim min max mod".split()},
    **{mark: mark for mark in "{}$%&#_"},
}  # fmt: skip


_STYLES = {
    "mathbf": "BOLD", "mathbb": "DOUBLE-STRUCK", "mathcal": "SCRIPT", "mathfrak": "FRAKTUR", "mathsf": "SANS-SERIF", "mathtt": "MONOSPACE",
    "mathit": "ITALIC",
}  # fmt: skip
_ACCENTS = {"vec": "\u20d7", "bar": "\u0305", "hat": "\u0302", "dot": "\u0307", "ddot": "\u0308", "tilde": "\u0303"}
_SILENT = ("mbox", "textup", "hspace", "color", "xrightarrow", "label")
"""Commands that show nothing of their argument."""
_MATRIX = re.compile(r"\\begin\s*\{((?:[pbvBV]|small)?matrix|array)\}(.*?)\\end\s*\{\1\}", re.DOTALL)
_COLUMNS = re.compile(r"\A\s*\{[^{}]*\}")


def plain_text(latex: str) -> str:
    r"""The text that a formula shows, on one line: unknown commands are left out, what they enclose is kept."""
    latex = _ENVIRONMENT.sub("", _MATRIX.sub(_matrix_rows, latex))
    return _Reader(list(_PIECE.finditer(latex))).rest(0).strip(" \n\t")


def _matrix_rows(match: re.Match[str]) -> str:
    """The rows of a matrix as `[ 1 2; 3 4 ]`."""
    inner = _COLUMNS.sub("", match.group(2)) if match.group(1) == "array" else match.group(2)
    rows = [" ".join(cell.strip() for cell in row.split("&")) for row in inner.split("\\\\")]
    return f"[ {'; '.join(row for row in rows if row)} ]"


def _styled(character: str, style: str) -> str:
    """A letter or digit in a mathematical alphabet of Unicode; any other character as it is."""
    case = "CAPITAL" if character.isupper() else "SMALL"
    names = [f"MATHEMATICAL {_STYLES[style]} {case} {character.upper()}", f"{_STYLES[style]} {case} {character.upper()}"]
    names += [name.replace("FRAKTUR", "BLACK-LETTER") for name in names]
    for name in names if character.isascii() and character.isalpha() else ():
        try:
            return unicodedata.lookup(name)
        except KeyError:
            continue
    return character


class _Reader:
    """Walks the pieces once. A command that takes arguments reads the next group, or the next single character."""

    def __init__(self, pieces: list[re.Match[str]]) -> None:
        self._pieces, self._place, self._pending = pieces, 0, ""

    def rest(self, depth: int) -> str:
        """The rest of the text, up to the brace that closes this group or the end."""
        shown: list[str] = []
        while self._pending or self._place < len(self._pieces):
            if not self._pending and self._pieces[self._place].group("brace") == "}":
                self._place += 1
                if depth:
                    break
                continue
            shown.append(self._next(depth))
        return "".join(shown)

    def _next(self, depth: int) -> str:
        if self._pending:
            text, self._pending = self._pending, ""
            return text.replace("~", "\u00a0").replace("&", "   ")
        piece = self._pieces[self._place]
        self._place += 1
        if piece.group("brace"):
            return self.rest(depth + 1) if depth < MAX_DEPTH else ""
        if piece.group("other") is not None:
            return piece.group("other").replace("~", "\u00a0").replace("&", "   ")
        return self._command(piece.group("command"), depth)

    def _command(self, name: str, depth: int) -> str:
        if depth >= MAX_DEPTH:
            return ""
        if name in ("frac", "dfrac", "tfrac"):
            return f" {self._argument(depth)}/{self._argument(depth)}"  # the space keeps 7\\frac{3}{4} a mixed number
        if name == "sqrt":
            self._skip_option()
            return f"sqrt({self._argument(depth)})"
        if name in _STYLES:
            return "".join(_styled(character, name) for character in self._argument(depth))
        if name in _ACCENTS:
            return unicodedata.normalize("NFC", self._argument(depth) + _ACCENTS[name])
        if name in _SILENT:
            self._argument(depth)
        return _SYMBOLS.get(name, "")

    def _argument(self, depth: int) -> str:
        """The next group, command or character."""
        if not self._pending and self._place < len(self._pieces) and self._pieces[self._place].group("other") is not None:
            self._pending = self._pieces[self._place].group("other")
            self._place += 1
        self._pending = self._pending.lstrip()
        if self._pending:
            character, self._pending = self._pending[0], self._pending[1:]
            return character
        if self._place >= len(self._pieces) or self._pieces[self._place].group("brace") == "}":
            return ""
        return self._next(depth + 1)

    def _skip_option(self) -> None:
        """The `[3]` of a cube root is not shown."""
        if self._place < len(self._pieces):
            other = self._pieces[self._place].group("other")
            if other and other.startswith("[") and "]" in other:
                self._pending = other.partition("]")[2]
                self._place += 1
