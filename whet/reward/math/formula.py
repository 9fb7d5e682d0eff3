r"""LaTeX formulas (`\frac{1}{2}`, `2\sqrt{3}`, `\sin 30\degree`, `n(n+1)/2`) as trees, by a grammar of their own.

What two readers could read differently (`1/2x`, `\sin x/2`) is `Ambiguous`: it is compared as text, never computed.
"""

from __future__ import annotations

import re

from whet.reward.math.arithmetic import Tree
from whet.reward.math.grammar import GREEK, Refused, TokenReader, check_formula, tokens_of

_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!\d)|\d+(?:\.\d*)?|\.\d+)|\\(?P<command>[A-Za-z]+|.)|(?P<letter>[A-Za-z])"
    r"|(?P<mark>[-+*/^_(){}\[\]|!]))",
    re.ASCII,
)
_NAMED_FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "exp", "log")
_CIRCULAR = ("sin", "cos", "tan", "cot", "sec", "csc")
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_PRODUCTS = ("*", "cdot", "times")
_QUOTIENTS = ("/", "div")
_SPACES = tuple(("command", name) for name in (" ", "quad", "qquad"))
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_ONE: Tree = ["number", "1"]


class Ambiguous(Refused):
    """The text may be a formula, but it can be read in more than one way, or says more than a formula does."""


def parse_latex(text: str) -> Tree:
    r"""The tree of a formula in LaTeX or plain text.

    Raises:
        Ambiguous: it has more than one reading, or a part that is not computed.
        Refused: it is no formula, or one beyond the bounds of `whet.reward.math.grammar`.
    """
    check_formula(text)
    parser = _Parser([token for token in tokens_of(text, _TOKEN) if token not in _SPACES])
    tree = parser.sum()
    parser.check_end()
    return tree


class _Parser(TokenReader):
    """Recursive descent. Depth and length are bounded by `check_formula`."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        super().__init__(tokens)
        self._angles = 0
        """Number of circular functions around this place."""
        self._bars = 0
        self._quotient = False
        """The product under way has been divided by a slash: what follows without a sign may belong to the divisor."""

    def _at(self, kind: str, *texts: str) -> bool:
        return self.kind == kind and self.text in texts

    def _expect(self, kind: str, text: str) -> None:
        if not self._at(kind, text):
            raise Refused(f"{self.text!r} is not expected there")
        self._place += 1

    def sum(self) -> Tree:
        tree = self._product()
        while self._at("mark", "+", "-"):
            tree = [self._take(), tree, self._product()]
        return tree

    def _product(self) -> Tree:
        outer, self._quotient = self._quotient, False
        tree = self._signed()
        while True:
            if self._at("mark", *_PRODUCTS) or self._at("command", *_PRODUCTS):
                self._take()
                tree, self._quotient = ["*", tree, self._signed()], False
            elif self._at("mark", *_QUOTIENTS) or self._at("command", *_QUOTIENTS):
                if self._after_function():
                    raise Ambiguous("a division after a function without brackets")
                self._take()
                tree, self._quotient = ["/", tree, self._signed()], True
            elif self._starts_factor():
                if self._quotient:
                    raise Ambiguous("a product without a sign after a division")
                tree = self._joined(tree)
            else:
                self._quotient = outer
                return tree

    def _after_function(self) -> bool:
        return self._bare_argument_ended_at == self._place

    _bare_argument_ended_at = -1

    def _starts_factor(self) -> bool:
        if self.kind == "number":
            return self._mixed_follows() or self._refuse_number()
        if self._at("mark", "|"):
            return not self._bars
        if self.kind == "mark":
            return self.text in "([{"
        if self.kind == "command":
            return self.text not in (*_PRODUCTS, *_QUOTIENTS, "rfloor", "rceil", "rvert", "}")
        return self.kind is not None

    def _mixed_follows(self) -> bool:
        """True if a number after a number is the fraction of a mixed number: `7 3/4`."""
        before = self._tokens[self._place - 1]
        rest = self._tokens[self._place : self._place + 3]
        return (
            before[0] == "number" and before[1].isdigit() and len(rest) == 3 and rest[0][0] == rest[2][0] == "number"
            and rest[0][1].isdigit() and rest[2][1].isdigit() and rest[1] == ("mark", "/")
        )  # fmt: skip

    def _refuse_number(self) -> bool:
        raise Ambiguous("a number follows without a sign")

    def _joined(self, tree: Tree) -> Tree:
        """The product of a tree with what follows without a sign, or the sum of a mixed number."""
        before = self._tokens[self._place - 1]
        if self.kind == "number":
            over, _, under = self._take(), self._take(), self._take()
            if self._starts_factor():
                raise Ambiguous("a product without a sign after a division")
            return _mixed(tree, ["/", ["number", over], ["number", under]])
        is_fraction = self._at("command", "frac") and before[0] == "number" and before[1].isdigit()
        factor = self._power()
        if is_fraction and factor[0] == "/" and all(part[0] == "number" for part in factor[1:]):
            return _mixed(tree, factor)
        return ["*", tree, factor]

    def _signed(self) -> Tree:
        signs = 0
        while self._at("mark", "+", "-"):
            signs += self._take() == "-"
        tree = self._power()
        if signs % 2 == 0:
            return tree
        return self._negative_product(tree)

    def _negative_product(self, tree: Tree) -> Tree:
        """A sign binds a mixed number as a whole: `-7\\frac{3}{4}` is -(7 + 3/4)."""
        while self._starts_factor() and not self._quotient:
            tree = self._joined(tree)
        return ["-", ["number", "0"], tree]

    def _power(self) -> Tree:
        base = self._atom()
        if not self._at("mark", "^"):
            return base
        self._take()
        if self._is_degree():
            return self._degrees(base)
        tree: Tree = ["^", base, self._exponent()]
        if self._at("mark", "!", "^"):
            raise Ambiguous("a factorial or a power after a power")
        return tree

    def _is_degree(self) -> bool:
        """True if an exponent is a degree sign, which is then consumed."""
        rest = self._tokens[self._place : self._place + 3]
        if rest[:1] == [("command", "circ")]:
            self._place += 1
            return True
        if rest == [("mark", "{"), ("command", "circ"), ("mark", "}")]:
            self._place += 3
            return True
        return False

    def _degrees(self, tree: Tree) -> Tree:
        return ["/", ["*", tree, ["pi"]], ["number", "180"]] if self._angles else tree

    def _exponent(self) -> Tree:
        if self._at("mark", "{", "("):
            return self._group()
        sign = self._take() if self._at("mark", "-", "+") else "+"
        if self.kind == "mark":
            raise Refused(f"{self.text!r} is no exponent")
        tree = self._bare_atom()
        return ["-", ["number", "0"], tree] if sign == "-" else tree

    def _group(self) -> Tree:
        opener = self._take()
        outer_bars, self._bars = self._bars, 0
        tree = self.sum()
        self._bars = outer_bars
        self._expect("mark", _CLOSERS[opener])
        return tree

    def _atom(self) -> Tree:
        tree = self._group() if self._at("mark", "(", "[", "{") else self._bars_or_atom()
        while self._at("mark", "!") or self._at("command", "degree"):
            tree = ["!", tree] if self._take() == "!" else self._degrees(tree)
        return tree

    def _bars_or_atom(self) -> Tree:
        if self._at("mark", "|") or self._at("command", "lvert", "|"):
            closer = {"|": "|", "lvert": "rvert"}[self._take()]
            self._bars += 1
            tree = self.sum()
            self._bars -= 1
            if self._take() != closer:
                raise Refused("its bars do not match")
            return ["abs", tree]
        return self._bare_atom()

    def _bare_atom(self) -> Tree:
        kind, text = self.kind, self._take()
        if kind == "number":
            if self._at("mark", "_"):
                raise Ambiguous("a number has a subscript")
            return ["number", text.replace(",", "").rstrip(".")]
        if kind == "letter":
            return self._symbol(text)
        if kind == "command":
            return self._command(text)
        raise Refused(f"{text!r} is not expected there")

    def _symbol(self, name: str) -> Tree:
        if not self._at("mark", "_"):
            return [name] if name in ("e", "i") else ["symbol", name]
        self._take()
        if not self._at("mark", "{"):
            return ["symbol", f"{name}_{self._take()}"]
        self._take()
        subscript = ""
        while not self._at("mark", "}"):
            subscript += self._take()
        self._take()
        return ["symbol", f"{name}_{subscript}"]

    def _command(self, name: str) -> Tree:
        if name == "frac":
            return ["/", self._argument(), self._argument()]
        if name == "binom":
            return ["binom", self._argument(), self._argument()]
        if name == "sqrt":
            return self._sqrt()
        if name == "pi":
            return ["pi"]
        if name in ("lfloor", "lceil"):
            tree = self.sum()
            self._expect("command", name.replace("l", "r", 1))
            return [name.replace("lfloor", "floor").replace("lceil", "ceil"), tree]
        if name in _NAMED_FUNCTIONS:
            return self._function(name)
        if name in _GREEK:
            return self._symbol(f"\\{name}")
        raise Ambiguous(f"\\{name} is not computed")

    def _argument(self) -> Tree:
        """A group in braces, or the next single digit, letter or command."""
        if self._at("mark", "{"):
            return self._group()
        if self.kind == "number":
            text = self.text
            if len(text) > 1:  # \\frac12: a digit at a time
                if not text.isdigit():
                    raise Refused("a \\frac without braces takes single digits")
                self._tokens[self._place] = ("number", text[1:])
                return ["number", text[0]]
        return self._bare_atom()

    def _sqrt(self) -> Tree:
        if self._at("mark", "["):
            degree = self._group()
            return ["root", degree, self._argument()]
        return ["sqrt", self._argument()]

    def _function(self, name: str) -> Tree:
        base: Tree | None = None
        if name == "log" and self._at("mark", "_"):
            self._take()
            base = self._argument()
        power: Tree | None = None
        if self._at("mark", "^"):
            self._take()
            power = self._exponent()
        if power == ["-", ["number", "0"], _ONE]:
            if name not in _INVERSES:
                raise Ambiguous(f"the inverse of \\{name}")
            name, power = _INVERSES[name], None
        self._angles += name in _CIRCULAR
        argument = self._function_argument()
        self._angles -= name in _CIRCULAR
        if name == "log":
            tree: Tree = ["log", base or ["unknown base"], argument]
        else:
            tree = [name, argument]
        return ["^", tree, power] if power else tree

    def _function_argument(self) -> Tree:
        """Argument of a function: the bracket that follows, or the factors up to the next sign,
        function or bracket."""
        if self._at("mark", "(", "[", "{"):
            tree = self._group()
            if self._at("mark", "^", "!"):
                raise Ambiguous("a power after a function's bracket")
            return tree
        tree = self._power()
        while self.kind == "letter" or (self.kind == "command" and self.text in ("pi", "frac", "sqrt", *_GREEK)):
            tree = ["*", tree, self._power()]
        self._bare_argument_ended_at = self._place
        return tree


def _mixed(whole: Tree, part: Tree) -> Tree:
    return ["+", whole, part]


_GREEK = frozenset(GREEK.split()) - {"pi"}
