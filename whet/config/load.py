"""From a TOML file and overrides to a validated configuration."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import ValidationError

from whet.config.base import Config
from whet.config.dump import UNSET_WORDS, dump_toml, plain
from whet.config.errors import ConfigError, failed_keys, located_problems, problems_of, show
from whet.config.lines import lines_of
from whet.config.schema import KeyPath, Options, admits_word, child_options, default_of, is_config, path_text
from whet.config.union import chosen

C = TypeVar("C", bound=Config)

_NO_NUMBER = object()
_ERROR_LINE = re.compile(r"\(at line (\d+), column (\d+)\)")


@dataclass(frozen=True, slots=True)
class _Override:
    path: tuple[str, ...]
    text: str

    @property
    def value(self) -> Any:
        """The text as a TOML value if it is one, otherwise unchanged."""
        # Inside brackets a trailing comment, a second value or a second line cannot pass for one value.
        try:
            parsed = tomllib.loads(f"value = [{self.text}]")
        except tomllib.TOMLDecodeError:
            return self.text
        values = cast(list[Any], parsed.get("value", []))
        return values[0] if len(parsed) == 1 and len(values) == 1 else self.text


def load_config(
    model: type[C], path: Path | None, overrides: Sequence[str] = (), *, base: Mapping[str, Any] | None = None
) -> C:
    """Reads a configuration: `base` at the bottom, the TOML file above it, `a.b.c=value` overrides on top.

    An override's value is read as TOML, else (or where the key wants text) taken as plain text. The words none and
    null unset an optional key, in files too. Relative paths in a file are left relative to the current directory.

    Raises:
        ConfigError: with every problem found, each under its full key.
    """
    parsed = [_parse_override(text) for text in overrides]
    data = _layered(path, parsed, base)
    source = str(path) if path is not None else ""
    data = _with_owners_defaults((model,), _unset_words((model,), data))
    try:
        return model.model_validate(_no_truth_for_numbers((model,), data))
    except ValidationError as error:
        wants_text = failed_keys(error, model, data, "string_type")
    data = _restore_text(data, [override for override in parsed if override.path in wants_text])
    try:
        return model.model_validate(_no_truth_for_numbers((model,), data))
    except ValidationError as error:
        problems = located_problems(error, model, data)
    lines = _lines_in_file(path, parsed, list(problems.values()))
    raise ConfigError(list(problems), source, lines)


def _lines_in_file(path: Path | None, overrides: Sequence[_Override], keys: Sequence[KeyPath]) -> list[int | None]:
    """Line of each key in the file; None: it has none, or an override sets the key, a table above it or a key below."""
    if path is None or not path.is_file():  # a pipe is read once
        return [None] * len(keys)
    known = lines_of(path.read_bytes().decode())
    typed = [override.path for override in overrides]
    return [None if any(key[: len(each)] == each[: len(key)] for each in typed) else known.get(key) for key in keys]


def validated(model: type[C], data: Mapping[str, Any], where: str) -> C:
    """A model made of settings that were read as part of another one. `where` says which they are.

    Raises:
        ConfigError: with every problem found.
    """
    try:
        return model.model_validate(_no_truth_for_numbers((model,), data))
    except ValidationError as error:
        raise ConfigError([f"{where}: {problem}" for problem in problems_of(error, model, data)]) from None


def read_tree(path: Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The settings of a file with overrides on top, as `load_config` reads them, before any model looks at them.

    Raises:
        ConfigError: the file cannot be read, or an override is not of the form key=value.
    """
    return _layered(path, [_parse_override(text) for text in overrides], None)


def _layered(path: Path | None, overrides: Sequence[_Override], base: Mapping[str, Any] | None) -> dict[str, Any]:
    data: dict[str, Any] = plain(base or {})
    if path is not None:
        data = _merge(data, _read_toml(path))
    for override in overrides:
        _set(data, override.path, override.value)
    return data


def _read_toml(path: Path) -> dict[str, Any]:
    if path.suffix in (".yaml", ".yml", ".json") and path.is_file():
        raise ConfigError([f"whet reads TOML, not {path.suffix[1:].replace('yml', 'yaml').upper()}; {_in_toml(path)}"], str(path))
    try:
        return tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise ConfigError([f"there is no configuration file {path}"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([f"not UTF-8 text (byte {error.start})"], str(path)) from None
    except tomllib.TOMLDecodeError as error:
        if isinstance(_other_format(path), dict) and path.read_text().lstrip().startswith("{"):
            raise ConfigError([f"whet reads TOML, not JSON; {_in_toml(path)}"], str(path)) from None
        match = _ERROR_LINE.search(str(error))
        last_line = len(path.read_text().splitlines())
        line, column = match.groups() if match else (str(last_line), "end")
        what = str(error).split(" (at ")[0]
        raise ConfigError([f"not valid TOML: {what} (column {column})"], f"{path}:{line}") from None
    except OSError as error:
        inside = path / "config.toml"
        advice = f"; did you mean {inside}?" if inside.is_file() else ""
        raise ConfigError([f"cannot read the configuration file {path}: {error.strerror}{advice}"]) from None


def _other_format(path: Path) -> Any:
    """The content of a file in JSON, or in YAML if that is its suffix; None if it cannot be read."""
    try:
        if path.suffix not in (".yaml", ".yml"):
            return json.loads(path.read_text())
        import yaml  # not one of whet's own needs, but most often there

        return yaml.safe_load(path.read_text())
    except Exception:  # whatever it is, it is not what whet reads
        return None


def _in_toml(path: Path) -> str:
    """The content of a YAML or JSON file in TOML; a general example if it cannot be read."""
    example = 'write tables in brackets and texts in quotes:\n\n[model]\npath = "Qwen/Qwen3-0.6B"'
    found = _other_format(path)
    if not isinstance(found, dict):
        return example
    try:
        return f"the same as {path.with_suffix('.toml')}:\n\n{dump_toml(_without_null(found))}"
    except ValueError:
        return example


def _without_null(value: Any) -> Any:
    """A tree without keys that are null: in TOML they are left out."""
    if isinstance(value, Mapping):
        return {str(key): _without_null(item) for key, item in cast(Mapping[Any, Any], value).items() if item is not None}
    return [_without_null(item) for item in cast(list[Any], value)] if isinstance(value, list) else value


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The tables merged key by key; any other value is replaced."""
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merge(merged[key], cast(Mapping[str, Any], value))
        else:
            merged[key] = value
    return merged


def _parse_override(text: str) -> _Override:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError([f"the override {text!r} is not of the form key=value, for example train.optim.lr=1e-5"])
    try:
        node: Any = tomllib.loads(f"{key.strip()} = 0") if "\n" not in key else {}
    except tomllib.TOMLDecodeError:
        node = {}
    path: list[str] = []
    while isinstance(node, dict) and node:
        name, node = next(iter(cast(dict[str, Any], node).items()))
        path.append(name)
    if not path or node != 0:
        raise ConfigError([f"the override {text!r} has no key that TOML could have: write it like a.b.c=value"])
    return _Override(tuple(path), value.strip())


def _set(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Puts a value at a path, making the tables on the way."""
    table = data
    for depth, key in enumerate(path[:-1]):
        below = table.get(key)
        if below is None or below in UNSET_WORDS:
            below = table[key] = {}
        if not isinstance(below, dict):
            parent = path_text(path[: depth + 1])
            raise ConfigError([f"cannot set {path_text(path)}: {parent} is {show(below)}, not a table"])
        table = cast(dict[str, Any], below)
    table[path[-1]] = value


def _unset_words(options: Options, value: Any) -> Any:
    """The value with "none" and "null" made None wherever the key is optional and the word is no value of its own."""
    if isinstance(value, Mapping):
        table = cast(Mapping[str, Any], value)
        options = chosen(options, table)
        return {key: _unset_words(child_options(options, key), item) for key, item in table.items()}
    if isinstance(value, list):
        items = cast(list[Any], value)
        return [_unset_words(child_options(options, index), item) for index, item in enumerate(items)]
    is_word = isinstance(value, str) and value in UNSET_WORDS
    return None if is_word and NoneType in options and not admits_word(options, value) else value


def _no_truth_for_numbers(options: Options, value: Any) -> Any:
    """The value with what no model takes in place of true and false where a number is wanted: pydantic would read 1 and 0."""
    if isinstance(value, Mapping):
        table = cast(Mapping[str, Any], value)
        options = chosen(options, table)
        return {key: _no_truth_for_numbers(child_options(options, key), item) for key, item in table.items()}
    if isinstance(value, list | tuple):
        items = cast(Sequence[Any], value)
        return [_no_truth_for_numbers(child_options(options, index), item) for index, item in enumerate(items)]
    if not isinstance(value, bool) or not (int in options or float in options):
        return value
    admits = any(option in (bool, Any) or (get_origin(option) is Literal and True in get_args(option)) for option in options)
    return value if admits else _NO_NUMBER


def _with_owners_defaults(options: Options, value: Any) -> Any:
    """The value with the settings that a model gives to its sub-models (`sampling: Sampling = Sampling(temperature=0)`)
    below those tables: setting one key of a table leaves its other defaults as they are."""
    if isinstance(value, list):
        items = cast(list[Any], value)
        return [_with_owners_defaults(child_options(options, index), item) for index, item in enumerate(items)]
    if not isinstance(value, dict):
        return value
    options = chosen(options, cast(object, value))
    models = [option for option in options if is_config(option)]
    fields = models[0].model_fields if len(models) == 1 else {}
    filled: dict[str, Any] = {}
    for key, item in cast(dict[str, Any], value).items():
        inside = chosen(child_options(options, key), item)
        default = default_of(fields[key]) if key in fields else None
        is_only = [option for option in inside if is_config(option)] == [type(default)]
        if isinstance(item, dict) and isinstance(default, Config) and is_only:
            item = _merge(plain(default.model_dump(exclude_unset=True)), cast(dict[str, Any], item))
        filled[key] = _with_owners_defaults(inside, item)
    return filled


def _restore_text(data: dict[str, Any], overrides: Sequence[_Override]) -> dict[str, Any]:
    """Overrides that only look like another type (`name=2024`), as the text their keys want."""
    for override in overrides:
        if not isinstance(override.value, list | dict):
            _set(data, override.path, override.text)
    return data
