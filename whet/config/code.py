"""The code that a configuration names by import references, as digests: whether it changed since an earlier start."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from whet.config.base import Config
from whet.config.dump import plain
from whet.config.reference import split_reference
from whet.here import digest as digest_here
from whet.here import is_here

MAX_FILES = 200
"""Limit on the files of one reference: its own file, and the neighbours that it imports."""
_INSTALLED = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib", "platlib"))
_PACKAGE = str(Path(__file__).resolve().parents[1])


def code_digests(config: Config | Mapping[str, Any]) -> dict[str, str]:
    """The sha256 of the code behind each import reference of a configuration, by the reference: of its file, and of the files in its
    folder and in the current one that it imports, directly or not.

    Installed packages are left out: their versions tell. So is what is imported by a name that is made while the code runs.
    """
    found: dict[str, str] = {}
    for text in dict.fromkeys(_texts(plain(config))):
        file = _file_of(text)
        if is_here(text):
            found[text] = digest_here(text)
        elif file is not None:
            digest = hashlib.sha256()
            for path in _with_imports(file):
                digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()} ".encode())
            found[text] = digest.hexdigest()
    return found


def changed_code(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The references in both whose code is not the same."""
    return [reference for reference, digest in now.items() if before.get(reference, digest) != digest]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in cast(dict[str, Any], value).values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in cast(list[Any], value):
            yield from _texts(item)


def _file_of(text: str) -> Path | None:
    """The file that a reference's module is in; None if the text is no reference, or its code is whet's own or installed."""
    try:
        module, _ = split_reference(text)
    except ValueError:
        return None
    if module.endswith(".py"):
        path = Path(module).expanduser().resolve()
        return path if path.is_file() else None
    path = _module_file(module, [Path.cwd(), *map(Path, sys.path)])
    return None if path is None or not _is_own(path) else path


def _is_own(path: Path) -> bool:
    return not str(path).startswith((*_INSTALLED, _PACKAGE))


def _module_file(module: str, folders: list[Path]) -> Path | None:
    """The first file that is a module of this name."""
    parts = module.split(".")
    for folder in folders:
        for path in (folder.joinpath(*parts).with_suffix(".py"), folder.joinpath(*parts, "__init__.py")):
            if path.is_file():
                return path.resolve()
    return None


def _with_imports(file: Path) -> list[Path]:
    """A file and those of the user's own that it imports, in the order in which they are met."""
    files = [file]
    for path in files:
        folders = [path.parent, file.parent, Path.cwd()]
        for module, level in _imports(path):
            base = [path.parents[level - 1]] if level else folders
            imported = _module_file(module, base) if module else None
            if imported is not None and imported not in files and len(files) < MAX_FILES and _is_own(imported):
                files.append(imported)
    return files


def _imports(path: Path) -> Iterator[tuple[str, int]]:
    """The modules that a file may import, each with how many dots stand before it. A name that is no module is found nowhere."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield module, node.level
            yield from (((f"{module}." if module else "") + alias.name, node.level) for alias in node.names)
