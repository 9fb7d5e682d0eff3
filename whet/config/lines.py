"""Line numbers of the keys in a TOML file, for error messages: tomllib gives none."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from typing import Any, cast

from whet.config.schema import KeyPath

MAX_LINES = 300
"""Maximum number of lines of one statement; a file with a longer one has no line numbers."""


def lines_of(text: str) -> dict[KeyPath, int]:
    """Line of each key and table header in the text of a valid TOML file, counted from 1.

    Keys inside a value of several lines are left out, and so are tables that several statements make. Each
    statement is read by tomllib, so both agree about the end of a text or a list.
    """
    lines, found = text.split("\n"), dict[KeyPath, int]()
    table: KeyPath = ()
    sizes = dict[KeyPath, int]()
    start = 0
    while start < len(lines):
        statement = _statement(lines, start)
        if statement is None:
            return {}
        parsed, end = statement
        if lines[start].lstrip().startswith("["):
            table = _opened_table(parsed, sizes)
            found[table] = start + 1
        else:
            for path in _paths(parsed) if end == start + 1 else _first_paths(parsed):
                place = (*table, *path)
                found[place] = 0 if place in found else start + 1
        start = end
    return {path: line for path, line in found.items() if line}


def _statement(lines: list[str], start: int) -> tuple[dict[str, Any], int] | None:
    """The statement that begins at a line, read, and the line after it; None: it has no end."""
    for end in range(start + 1, min(start + MAX_LINES, len(lines)) + 1):
        try:
            return tomllib.loads("\n".join(lines[start:end]) + "\n"), end
        except tomllib.TOMLDecodeError:
            continue
    return None


def _opened_table(header: dict[str, Any], sizes: dict[KeyPath, int]) -> KeyPath:
    """Path of the table that a header opens; `sizes` counts the tables of each array of tables, and is updated."""
    path = list[str | int]()
    node: object = header
    while node and isinstance(node, dict):
        name, node = next(iter(cast(dict[str, object], node).items()))
        path.append(name)
        if isinstance(node, list):
            sizes[tuple(path)] = sizes.get(tuple(path), 0) + 1
        if tuple(path) in sizes:
            path.append(sizes[tuple(path)] - 1)
    return tuple(path)


def _paths(value: object, above: KeyPath = ()) -> Iterator[KeyPath]:
    """Paths of all keys and list items in a value."""
    items: Iterable[tuple[str | int, object]] = ()
    if isinstance(value, dict):
        items = cast(dict[str | int, object], value).items()
    elif isinstance(value, list):
        items = enumerate(cast(list[object], value))
    for key, item in items:
        yield (*above, key)
        yield from _paths(item, (*above, key))


def _first_paths(value: object, above: KeyPath = ()) -> Iterator[KeyPath]:
    """Paths of the keys that certainly stand in a statement's first line: each is the only one in its table."""
    if isinstance(value, dict) and len(cast(dict[str, object], value)) == 1:
        ((key, item),) = cast(dict[str, object], value).items()
        yield (*above, key)
        yield from _first_paths(item, (*above, key))
