"""Docstrings begin with what a thing is or does, in plain words, and a public name means one thing in the whole package."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "whet"
WORDS = {"Of", "What", "Whether", "Where", "How", "Who", "Whose", "Whom", "Whoever", "Whatever", "Whichever"}
RETIRED = {
    "anew": "again, or restarted",
    "begun": "started",
    "beside": "next to, or in addition to",
    "leader": "controller, or rank 0",
    "lies": "is",
    "so many": "the number itself",
    "stands": "is",
    "tally": "count, or stats",
    "told": "called with, listed or reported",
    "whoever": "the caller, the reader, or another noun",
}
"""Words that docstrings and comments do without, each with better ones. Code in backquotes may have them."""

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring: of modules, classes and functions, and under assignments."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for before, each in zip([node, *body], body, strict=False) if isinstance(body, list) else ():
            if isinstance(before, DOCUMENTED) and isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                text = each.value.value
                if isinstance(text, str):
                    yield each.lineno, text


def begins_badly(text: str) -> bool:
    first = re.match(r"\W*(\w+)", text)
    return first is not None and first[1] in WORDS


def retired(text: str) -> list[str]:
    """Retired words of a text, without its code in backquotes."""
    plain = re.sub(r"`[^`]*`", "", text)
    return [word for word in RETIRED if re.search(rf"\b{word}\b(?!:)", plain, re.IGNORECASE)]


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of every comment of a module."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def public_names(tree: ast.Module) -> set[str]:
    """Classes and type aliases (`Name = A[...]`, `Name = A | B`, `Name = A`) of a module, without private ones."""
    names = set[str]()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp | ast.Name):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if re.fullmatch(r"[A-Z]+[a-z][A-Za-z0-9]*", name)}


def doubles() -> dict[str, list[str]]:
    """Every public name that more than one module defines, with the modules."""
    where: dict[str, list[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for name in public_names(ast.parse(path.read_text())):
            where.setdefault(name, []).append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in where.items() if len(paths) > 1}


def test_every_kind_of_docstring_is_seen():
    text = '"""Of a"""\nclass A:\n    """B"""\n    b: int\n    """Who"""\n    def f():\n        """How"""\n        x = 1\n        """It"""'
    tree = ast.parse(text)
    assert [text for _, text in docstrings(tree) if begins_badly(text)] == ["Of a", "Who", "How"]
    assert sorted(line for line, _ in docstrings(tree)) == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("place", sorted({path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")}))
def test_docstrings_say_what_a_thing_is_or_does(place: str):
    paths = [ROOT / place] if place.endswith(".py") else sorted((ROOT / place).rglob("*.py"))
    found = {f"{path.relative_to(ROOT)}:{line}": text for path in paths for line, text in docstrings(ast.parse(path.read_text()))}
    assert {place: text for place, text in found.items() if begins_badly(text)} == {}


def test_docstrings_and_comments_do_without_retired_words():
    assert retired("`told` is it, and so\nbegun: a name; Lies in it") == ["lies"]
    assert list(comments("a = '#no'  # it is told\n")) == [(1, "# it is told")]
    found: dict[str, str] = {}
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        for line, prose in (*docstrings(ast.parse(text)), *comments(text)):
            found |= {f"{path.relative_to(ROOT)}:{line}: {word}": f"write: {RETIRED[word]}" for word in retired(prose)}
    assert found == {}


def names(tree: ast.Module) -> set[str]:
    """Every variable, argument, attribute, function and class of a module, in lower case and without leading underscores."""
    found = {getattr(node, field, None) for node in ast.walk(tree) for field in ("id", "arg", "attr", "name")}
    return {name.lstrip("_").lower() for name in found if isinstance(name, str)}


def test_nothing_has_a_retired_name():
    assert names(ast.parse("class _Told:\n    def f(self, said): self.tally = beside")) == {"told", "f", "self", "said", "tally", "beside"}
    bad = {"beside", "leader", "said", "tally", "told"}
    found = {str(path.relative_to(ROOT)): names(ast.parse(path.read_text())) & bad for path in sorted(ROOT.rglob("*.py"))}
    assert {path: names for path, names in found.items() if names} == {}


def test_public_names_mean_one_thing():
    text = "class Aa: ...\nBb = int | str\nCc = Literal['a']\nDd = 1\nEe = f()\nMAX = X | Y\nclass _Gg: ..."
    assert public_names(ast.parse(text)) == {"Aa", "Bb", "Cc"}
    assert doubles() == {}
