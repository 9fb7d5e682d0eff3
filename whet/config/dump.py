"""Writing a configuration: TOML that loads back to the same values, and a hash of it."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast

from pydantic_core import PydanticUndefined

from whet.config.base import Config
from whet.config.schema import default_of, fields_of

UNSET_WORDS = ("none", "null")
"""Words for "unset" as the value of an optional key, which TOML itself cannot say."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def dump_toml(config: Config | Mapping[str, Any]) -> str:
    """The resolved configuration as TOML, defaults included, keys in declaration order (a table's own keys before its
    sub-tables, as TOML requires). `load_config` reads the same values back. A mapping is what a TOML file parses to.

    An unset key is written as a comment, or as "none" where its default is something else.
    """
    return "\n".join(_table(config, (), None)).strip() + "\n"


def config_hash(config: Config) -> str:
    """The sha256 of the configuration's canonical JSON, in hexadecimal: equal for equal settings."""
    canonical = json.dumps(plain(config), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def plain(value: Any) -> Any:
    """A setting in TOML's types (and None): models and mappings become dicts, paths and enums their text."""
    if isinstance(value, Config):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast(Mapping[Any, Any], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(list[Any], value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in cast(set[Any], value)), key=repr)
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str | datetime.date | datetime.time):
        return value
    raise ValueError(f"a setting of type {type(value).__name__} cannot be written as TOML: {value!r}")


def toml_value(value: Any) -> str:
    """A value on one line."""
    value = plain(value)
    if isinstance(value, str):
        return '"' + "".join(_escaped(char) for char in value) + '"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return toml_value(UNSET_WORDS[0])
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(item) for item in cast(list[Any], value)) + "]"
    if isinstance(value, dict):
        items = (f"{_key(key)} = {toml_value(item)}" for key, item in cast(dict[str, Any], value).items())
        return "{" + ", ".join(items) + "}"
    return repr(value)


def _escaped(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    return f"\\u{ord(char):04X}" if ord(char) < 32 or ord(char) == 127 else char


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)


def _is_table(value: Any) -> bool:
    return isinstance(value, Config | Mapping)


def _is_array_of_tables(value: Any) -> bool:
    items = cast(list[Any], value) if isinstance(value, list | tuple) else []
    return bool(items) and all(_is_table(item) for item in items)


def _entries(table: Config | Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(table, Config):
        return ((name, getattr(table, name)) for name in fields_of(type(table)))
    return ((str(key), value) for key, value in table.items())


def _default(table: Config | Mapping[str, Any], key: str, given: Any) -> Any:
    """Value of a key that a file leaves out: `given` is the declaration of the table's owner, if it has
    one."""
    if not isinstance(table, Config):
        return PydanticUndefined
    return getattr(given, key) if type(given) is type(table) else default_of(type(table).model_fields[key])


def _table(table: Config | Mapping[str, Any], path: tuple[str, ...], given: Any) -> Iterator[str]:
    """The lines of a table: its own keys, then its sub-tables, each below its header."""
    below: list[tuple[str, Any]] = []
    for key, value in _entries(table):
        if _is_table(value) or _is_array_of_tables(value):
            below.append((key, value))
        elif value is None and _default(table, key, given) is None:
            yield f"# {_key(key)} = (unset)"
        else:
            yield f"{_key(key)} = {toml_value(value)}"
    for key, value in below:
        inner = (*path, key)
        header = ".".join(_key(part) for part in inner)
        if _is_table(value):
            yield from ("", f"[{header}]", *_table(value, inner, _default(table, key, given)))
            continue
        for item in value:
            yield from ("", f"[[{header}]]", *_table(item, inner, None))
