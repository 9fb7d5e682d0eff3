"""The formulas that whet lets a computer algebra system see: a whitelist, with bounds on size, depth and growth.

A computer algebra system evaluates what it reads, and some of it eagerly. Everything here is decided by scanning
the text once; what does not pass costs that scan and nothing else.
"""

from __future__ import annotations

import math
import re

MAX_LENGTH = 400
MAX_DEPTH = 12
MAX_DIGITS = 40
MAX_WORD = 3
"""Letters in a row outside of commands: a product of variables. Anything longer is prose."""
MAX_POWER = 1000
"""Largest product of exponents that apply to one base, and of the numbers within one exponent."""
MAX_TERMS = 10_000
"""Most terms that the powers of all groups can expand to, if they are multiplied."""

GREEK = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau phi "
    "varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
_SAFE_IN_EXPONENT = f"frac sqrt pi circ degree cdot times div ln log infty {GREEK}"
_COMMANDS = frozenset(
    f"{_SAFE_IN_EXPONENT} sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp binom pm "
    "cup cap in setminus mathbb emptyset leq le geq ge neq ne lt gt approx text mathrm mathbf textbf "
    "begin end infin prime quad qquad lfloor rfloor lceil rceil lvert rvert "
    "{ } % $ | ; : \\".split()
) | {",", " "}
_EXPONENT_COMMANDS = frozenset(_SAFE_IN_EXPONENT.split())
_ENVIRONMENTS = frozenset({"matrix", "pmatrix", "bmatrix"})

_CHARACTERS = re.compile(r"[A-Za-z0-9 +\-*/=<>()\[\]{}|.,:!^_\\&%]*")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf|mathbb)\s*\{[A-Za-z0-9 .,-]*\}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*(?:\{([a-z]*)\})?")
_SUBSCRIPT = re.compile(r"_(?!(?:[A-Za-z0-9](?![_^]*_)|\{[A-Za-z0-9]{1,8}\}))")
_BINOM_ARGUMENT = r"(?:\{(?![^}]*\d{4})[a-z0-9+\- ]{1,5}\}|\d)"
_BINOM = re.compile(rf"\\binom\s*(?!{_BINOM_ARGUMENT}\s*{_BINOM_ARGUMENT})")
_FACTORIAL = re.compile(r"(?<![0-9A-Za-z])!|!\s*!|\d{4}!")
_BARE_EXPONENT = re.compile(r"[-+]? *(?:\d+|[A-Za-z])")
_OPEN, _CLOSE = "([{", ")]}"


class Refused(ValueError):
    """The text is outside of the grammar; the message says why."""


def tokens_of(text: str, pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """The tokens of a formula, each as its kind and its text.

    Args:
        text: the formula.
        pattern: matches one token and the spaces before it; its named groups are the kinds.

    Raises:
        Refused: if a part of the text is no token.
    """
    tokens: list[tuple[str, str]] = []
    place, text = 0, text.rstrip()
    while place < len(text):
        match = pattern.match(text, place)
        if match is None:
            raise Refused(f"{text[place:].lstrip()[:1]!r} does not belong to a formula")
        kind = match.lastgroup
        assert kind is not None
        tokens.append((kind, match.group(kind)))
        place = match.end()
    return tokens


class TokenReader:
    """A place in a formula's tokens, for parsers by recursive descent."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._place = tokens, 0

    @property
    def kind(self) -> str | None:
        return self._tokens[self._place][0] if self._place < len(self._tokens) else None

    @property
    def text(self) -> str:
        return self._tokens[self._place][1] if self._place < len(self._tokens) else "its end"

    def check_end(self) -> None:
        """Raises `Refused` unless every token was taken."""
        if self.kind is not None:
            raise Refused(f"{self.text!r} is not expected there")

    def _take(self) -> str:
        text = self.text
        if self._place >= len(self._tokens):
            raise Refused("it ends too early")
        self._place += 1
        return text


def check_formula(text: str) -> None:
    """Raises `Refused` unless the text may be given to the computer algebra system."""
    if not text:
        raise Refused("it is empty")
    if len(text) > MAX_LENGTH:
        raise Refused(f"it is {len(text)} characters long; at most {MAX_LENGTH} are compared as a formula")
    if not _CHARACTERS.fullmatch(text):
        raise Refused("it has characters that no formula has")
    for command in _COMMAND.findall(text):
        if command not in _COMMANDS:
            raise Refused(f"\\{command} is not among the commands that are compared")
    if text.endswith("\\") and not text.endswith("\\\\"):
        raise Refused("it ends in a lone backslash")
    for environment in _ENVIRONMENT.findall(text):
        if environment not in _ENVIRONMENTS:
            raise Refused(f"the environment {environment!r} is not among those that are compared")
    if _SUBSCRIPT.search(text):
        raise Refused("a subscript is one letter or digit, or up to eight in braces")
    bare = _COMMAND.sub(" ", _ENVIRONMENT.sub(" ", _TEXT.sub(" ", text)))
    if word := re.search(rf"[A-Za-z]{{{MAX_WORD + 1},}}", bare):
        raise Refused(f"{word.group()[:20]!r} is a word, not a product of variables")
    if re.search(rf"\d{{{MAX_DIGITS + 1},}}", text):
        raise Refused(f"a number has more than {MAX_DIGITS} digits")
    _check_growth(text)


def _check_growth(text: str) -> None:
    if _BINOM.search(text):
        raise Refused("the arguments of \\binom are at most five letters and digits, and no number of more than three")
    if _FACTORIAL.search(text):
        raise Refused("a factorial follows a letter or a number of at most three digits")
    if "^" in text and ("!" in text or "\\binom" in text):
        raise Refused("powers are not compared together with factorials or binomials")
    _check_powers(text, num_variables=len(_variables(text)))


def _variables(text: str) -> set[str]:
    """Every letter and Greek letter of the text."""
    commands = set(_COMMAND.findall(text))
    return (commands & frozenset(GREEK.split())) | {letter for letter in _COMMAND.sub(" ", text) if letter.isalpha()}


def _check_powers(text: str, num_variables: int) -> None:
    """Walk the brackets: `powers` holds, per open group, the largest power within it so far."""
    powers, last, i, degree = [1], 1, 0, 0
    while i < len(text):
        character = text[i]
        if character == "^":
            exponent, end = _exponent(text, i + 1)
            before = text[:i].rstrip()[-1:]
            # After a brace the base may be a command's several groups; after a bar, what is between the bars.
            base = powers[-1] if before in ("}", "|") else last
            last = base * _exponent_bound(exponent)
            if last > MAX_POWER:
                raise Refused(f"a power of up to {last} is more than {MAX_POWER}")
            degree += last if before in (")", "]", "}", "|") else 0
            if math.comb(degree + num_variables, num_variables) > MAX_TERMS:
                raise Refused(f"its powers expand to more than {MAX_TERMS} terms")
            powers[-1] = max(powers[-1], last)
            i = end
            if text[i:].lstrip()[:1] == "^":
                raise Refused("a tower of powers")
            continue
        if character in _OPEN:
            powers.append(1)
            if len(powers) > MAX_DEPTH + 1:
                raise Refused(f"its brackets nest deeper than {MAX_DEPTH}")
        elif character in _CLOSE:
            if len(powers) == 1:
                raise Refused("its brackets do not match")
            last = powers.pop()
            powers[-1] = max(powers[-1], last)
        elif not character.isspace():
            last = 1
        i += 1
    if len(powers) != 1:
        raise Refused("its brackets do not match")


def _exponent(text: str, start: int) -> tuple[str, int]:
    """The exponent that begins at `start`, and where it ends."""
    start += len(text[start:]) - len(text[start:].lstrip())
    if text[start : start + 1] not in ("{", "("):
        bare = _COMMAND.match(text, start) or _BARE_EXPONENT.match(text, start)
        end = bare.end() if bare else start + 1
        return text[start:end], end
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in _OPEN) - (text[i] in _CLOSE)
        if depth == 0:
            return text[start + 1 : i], i + 1
    raise Refused("its brackets do not match")


def _exponent_bound(exponent: str) -> int:
    """Bound on an exponent: the product of its numbers. Within it only a variable may be raised, to a
    digit."""
    if not exponent.strip():
        raise Refused("an exponent is missing")
    for command in _COMMAND.findall(exponent):
        if command not in _EXPONENT_COMMANDS:
            raise Refused(f"\\{command} in an exponent")
    without_variables = re.sub(r"(?<![A-Za-z\\0-9])[A-Za-z]\^(?:[0-9](?![0-9^])|\{[0-9]\})", "x", exponent)
    if "^" in without_variables:
        raise Refused("a tower of powers")
    bound = 1
    for digits in re.findall(r"\d+", exponent):
        if len(digits) > 4:
            raise Refused(f"an exponent of {len(digits)} digits")
        bound *= max(int(digits), 2 if "+" in exponent or "-" in exponent else 1)
    return bound
