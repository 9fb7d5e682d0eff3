"""The arguments of a call as settings: nested keys, rows, and functions of the caller."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

from whet.api.rows import check_paths, is_path, rows_text
from whet.build.run_dirs import ROWS
from whet.config import Config, ConfigError, load_config
from whet.config.errors import show
from whet.here import MODULE

NO_DATA = "-"
"""In place of the files of training data, where a call has none."""


@dataclass(slots=True)
class Given:
    """Settings of a call, and what they name that is no text."""

    tree: dict[str, Any]
    functions: dict[str, Any] = field(default_factory=dict[str, Any])
    """Functions and classes that no other process can import, by their names in `whet.here`."""
    rows: dict[str, str] = field(default_factory=dict[str, str])
    """JSON lines, by the name of their file."""

    def in_folder(self, folder: Path) -> dict[str, Any]:
        """The settings of a run in that folder."""

        def placed(value: Any) -> Any:
            return str(folder / ROWS / value.name) if isinstance(value, _Rows) else value

        return {**_replaced(self.tree, placed), "run_dir": str(folder)}

    def write_rows(self, folder: Path) -> None:
        """Write the rows into a run's folder.

        Raises:
            ValueError: it cannot be written.
        """
        try:
            for name, text in self.rows.items():
                (folder / ROWS).mkdir(parents=True, exist_ok=True)
                (folder / ROWS / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"run_dir: {folder} cannot be written: {error.strerror}; choose another with run_dir=PATH") from error

    def same_rows(self, folder: Path) -> bool:
        """True if the run in that folder has the same rows."""
        files = {name: folder / ROWS / name for name in self.rows}
        return all(file.is_file() and file.read_text(encoding="utf-8") == self.rows[name] for name, file in files.items())

    def config(self, model: type[Config], folder: Path) -> Any:
        """The settings of a run in that folder, checked.

        Raises:
            ConfigError: with every problem found.
        """
        return load_config(model, None, (), base=self.in_folder(folder))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The place of rows in settings."""

    name: str


def read_given(arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> Given:
    """The settings of a call.

    Args:
        arguments: tables as trees, in which None means that the call leaves it out.
        settings: keyword arguments: tables, and keys below tables with `__` between the parts.

    Raises:
        ConfigError: a key is given twice, or below what is no table.
    """
    tree: dict[str, Any] = {}
    for key, value in [*((key, value) for key, value in arguments.items() if value is not None), *settings.items()]:
        if "." in key:
            raise ConfigError([f"{key}: unknown key; write the parts of a key with __ between them: {key.replace('.', '__')}"])
        _put(tree, tuple(key.split("__")), _tree_of(value) if isinstance(value, Mapping) else value, key)
    given = Given({})
    given.tree = cast(dict[str, Any], _read(tree, (), given))
    if given.tree.get("run_dir", "") is None:  # as if the call left it out
        del given.tree["run_dir"]
    if not isinstance(folder := given.tree.get("run_dir", "-"), str) or not folder:
        raise ConfigError([f"run_dir = {show(folder)}: expected the path of a folder"])
    return given


def refuse_unread(call: str, why: str, settings: Mapping[str, Any], unread: Mapping[str, str]) -> None:
    """Refuse the settings of a call that it does not read.

    Args:
        call: its name.
        why: what the call does, so that it does not read them.
        settings: keyword arguments, as for `read_given`.
        unread: keys and tables that it does not read, each with what to do instead.

    Raises:
        ConfigError: naming each of them.
    """
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        _put(tree, tuple(key.split("__")), _tree_of(value) if isinstance(value, Mapping) else value, key)
    problems: dict[str, str] = {}
    for key, remedy in unread.items():
        found: Any = tree
        for name in key.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        problems |= {leaf: f"{leaf} has no effect in {call}, which {why}; {remedy}" for leaf in _leaves(key, found)}
    if problems:
        raise ConfigError([*problems.values()])


def _leaves(key: str, value: Any) -> list[str]:
    """Keys of the values in a table, below its own key; none of what is not set."""
    if isinstance(value, dict):
        return [leaf for name, item in cast(dict[str, Any], value).items() for leaf in _leaves(f"{key}.{name}", item)]
    return [] if value is None else [key]


def _tree_of(table: Mapping[Any, Any]) -> dict[str, Any]:
    """A copy of a table, and of the tables in it."""
    return {str(key): _tree_of(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _put(tree: dict[str, Any], path: Sequence[str], value: Any, key: str) -> None:
    """Set a key; tables are laid over those that there are."""
    name, below = path[0], path[1:]
    if not name:
        raise ConfigError([f"{key}: unknown key; write the parts of a key with __ between them, for example train__optim__lr"])
    if below:
        if not isinstance(tree.setdefault(name, {}), dict):
            raise ConfigError([f"{key} is set, but {name} is {tree[name]!r}, not a table: give one of the two"])
        _put(tree[name], below, value, key)
    elif isinstance(value, dict) and isinstance(tree.get(name), dict):
        for inner, item in cast(dict[str, Any], value).items():
            _put(tree[name], (inner,), item, f"{key}.{inner}")
    elif name in tree:
        raise ConfigError([f"{key} is given twice: {tree[name]!r} and {value!r}"])
    else:
        tree[name] = value


def _read(value: Any, path: tuple[str, ...], given: Given) -> Any:
    """A value with rows and functions moved to `given`."""
    if _names_data(path) and is_path(value):
        check_paths(value)
    elif _names_data(path) and value is not None:
        name = f"{_file_of(path)}.jsonl"
        given.rows[name] = rows_text(value, ".".join(path))
        return _Rows(name)
    if isinstance(value, Mapping):
        return {key: _read(item, (*path, key), given) for key, item in cast(Mapping[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [_read(item, path, given) for item in cast(Sequence[Any], value)]
    if isinstance(value, Path):
        return str(value)
    if callable(value):
        return _reference(value, given)
    number: Any = value
    found: Any = number.item() if hasattr(number, "dtype") and hasattr(number, "item") else number  # numpy's numbers
    if found is None or isinstance(found, bool | int | float | str | Enum):
        return found
    key, kind = ".".join(path), type(value).__name__
    advice = "name its folder, or write it to one with save_pretrained" if path[0] == "model" else "give text, a number, a list or a table"
    raise ConfigError([f"{key} is an object of the type {kind}, which no setting holds: {advice}"])


def _names_data(path: tuple[str, ...]) -> bool:
    """True for a setting that names data files."""
    is_set = len(path) == 4 and path[:2] == ("evaluate", "sets") and path[3] == "path"
    return is_set or path in (("data", "train"), ("data", "path"), ("evaluate", "path"))


def _file_of(path: tuple[str, ...]) -> str:
    if path[0] == "data":
        return "train"
    return path[2] if len(path) == 4 else "held_out"


def _replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, change) for key, item in cast(dict[str, Any], value).items()}
    return [_replaced(item, change) for item in cast(list[Any], value)] if isinstance(value, list) else change(value)


def _reference(function: Callable[..., Any], given: Given) -> str:
    """The import reference of a function; one of `whet.here` if another process could not import it."""
    found = importable(function)
    if found is not None:
        return found
    from whet import here

    named = getattr(function, "__name__", type(function).__name__).replace("<lambda>", "lambda")
    stem = named if named.isidentifier() and not hasattr(here, named) else f"{type(function).__name__}_"
    name, count = stem, 1
    while name in given.functions and given.functions[name] is not function:
        count += 1
        name = f"{stem}_{count}"
    given.functions[name] = function
    return f"{MODULE}:{name}"


def importable(function: Callable[..., Any]) -> str | None:
    """The reference `module:name` under which any process of this machine finds a function; None: there is none."""
    module_name, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    module = sys.modules.get(module_name or "")
    if module is None or module_name in (None, "__main__", "builtins") or not all(part.isidentifier() for part in name.split(".")):
        return None
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):
        return None
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    is_there = spec is not None and spec.origin is not None and spec.origin == getattr(module, "__file__", None)
    return f"{module_name}:{name}" if is_there and found is function else None
