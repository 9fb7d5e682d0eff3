"""Texts of whet's own source: sentences with their gaps, keys of settings and their choices, words, and
places of functions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
MIN_LETTERS = 6
"""Least number of letters of a sentence: with fewer, the gaps would say more than whet does."""
_DATA = ("reward/instructions", "quickstart/problems.py")
"""Files whose strings are texts for models, not whet's own words."""
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]{1,39}")

Sentence = tuple[str, ...]
"""The fixed parts of a text; gaps lie between them, and before or after an empty one."""


@dataclass(frozen=True, slots=True)
class SourceTexts:
    """Texts found in the source."""

    keys: set[str] = field(default_factory=set[str])
    """Keys of settings."""
    number_keys: set[str] = field(default_factory=set[str])
    """Keys that may have a number."""
    free_keys: set[str] = field(default_factory=set[str])
    """Keys under which a user may have any keys."""
    named_keys: set[str] = field(default_factory=set[str])
    """Keys under which a user names tables of declared keys."""
    choices: set[str] = field(default_factory=set[str])
    """Values that settings may have: of a `Literal`, and names of what is built in."""
    words: set[str] = field(default_factory=set[str])
    """All strings, and their parts between slashes and dots."""
    classes: set[str] = field(default_factory=set[str])
    functions: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """The file, relative to the package, and the name."""
    files: set[str] = field(default_factory=set[str])
    sentences: dict[str, list[Sentence]] = field(default_factory=dict[str, list[Sentence]])
    """Sentences by one of their words, which a text must contain to be one of them."""


@cache
def own_source() -> SourceTexts:
    """Read the source that is installed; where it is not, nothing is known."""
    out = SourceTexts()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_bytes())
        out.files.add(name)
        own = not name.startswith(_DATA)
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                out.functions.add((name, node.name))
            elif isinstance(node, ast.ClassDef):
                out.classes.add(node.name)
                _add_keys(node, out)
            elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
                out.choices.update(_strings(node.slice))
            elif own and isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and id(node) not in documentation:
                _add_text(node, out)
        for node in tree.body:
            if own and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Dict):
                out.choices.update(key for each in node.value.keys if node.target.id.isupper() for key in _strings(each))
    out.words.update(out.keys, out.choices)
    return out


def _add_keys(node: ast.ClassDef, out: SourceTexts) -> None:
    if not any(ast.unparse(base).endswith(("Config", "Options", "Choice")) for base in node.bases):
        return
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            out.keys.add(each.target.id)
            kind = ast.unparse(each.annotation)
            if re.search(r"\b(int|float|\w+Int|\w+Float)\b", kind):
                out.number_keys.add(each.target.id)
            if "[str, Any]" in kind:
                out.free_keys.add(each.target.id)
            elif re.search(r"\[str, \w+Config\]", kind):
                out.named_keys.add(each.target.id)


def _strings(node: ast.expr | None) -> Iterator[str]:
    for each in ast.walk(node) if node is not None else ():
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def _add_text(node: ast.expr, out: SourceTexts) -> None:
    parts = list(_parts(node))
    for line in _lines(parts):
        whole = "\0".join(line)
        out.words.update(part for part in re.split(r"[/.\0]", whole) if _WORD.fullmatch(part))
        inner = [word for each in _bounded(line) for word in re.findall(r"[A-Za-z]{2,}", each)]
        if inner and sum(map(str.isalpha, whole)) >= MIN_LETTERS:
            out.sentences.setdefault(max(inner, key=len), []).append(line)


def _bounded(line: Sentence) -> list[str]:
    """The fixed parts without words that a gap touches, and may go on in it."""
    last = len(line) - 1
    out: list[str] = []
    for place, text in enumerate(line):
        text = text if place == 0 else re.sub(r"^[A-Za-z]+", "", text)
        out.append(text if place == last else re.sub(r"[A-Za-z]+$", "", text))
    return out


def _parts(node: ast.expr) -> Iterator[str | None]:
    """The text of an expression; None: a gap."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        for value in node.values:
            yield from _parts(value)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        yield from _parts(node.left)
        yield from _parts(node.right)
    else:
        yield None


def _lines(parts: list[str | None]) -> Iterator[Sentence]:
    """The sentences of a text, one for each of its lines."""
    line, after_gap = [""], False
    for part in parts:
        if part is None:
            if not after_gap:
                line.append("")
            after_gap = True
            continue
        first, *more = part.split("\n")
        line[-1] += first
        for text in more:
            yield tuple(line)
            line = [text]
        after_gap = False if part else after_gap
    yield tuple(line)
