"""Errors of a configuration, all at once, in the words of its user."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from whet.config.base import Config
from whet.config.dump import toml_value
from whet.config.elsewhere import known_elsewhere
from whet.config.schema import (
    KeyPath,
    child_options,
    fields_of,
    is_config,
    key_paths,
    options_of,
    path_text,
    type_text,
)
from whet.config.union import Members, child_of, chosen, members_of, node_at, options_at

_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "mapping_type": "a table",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "one of {expected}",
    "enum": "one of {expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "text of at least {min_length} characters",
    "too_short": "a length of at least {min_length}",
    "too_long": "a length of at most {max_length}",
}
"""Messages by pydantic's error type: the expected value, with the error's context filled in."""

_NO_MEMBER = ("union_tag_invalid", "union_tag_not_found")
"""Pydantic's error types where a table is none of a choice's models."""

_MAX_ELSEWHERE = 4
"""Number of places of a key's name that an error lists; a name with more places lists none."""

_MAX_SINGLE_KEYS = 3
"""Number of keys of a misplaced table up to which each has an error of its own."""

_NEAR = 0.6
"""Similarity (difflib's ratio) from which a key counts as a likely misspelling."""


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Args:
        problems: one text for each problem.
        source: file of the configuration; "": none.
        lines: line of each problem in the file, where it is known.
    """

    def __init__(self, problems: Sequence[str], source: str = "", lines: Sequence[int | None] = ()) -> None:
        self.problems = tuple(problems)
        self.source = source
        self.lines = tuple(lines) or (None,) * len(self.problems)
        if len(self.problems) == 1:
            text = self.located[0]
        else:
            places = (f"line {line}: " if line else "" for line in self.lines)
            listed = (f"  {place}{problem}".replace("\n", "\n    ") for place, problem in zip(places, self.problems, strict=True))
            text = "\n".join([f"{source}: " * bool(source) + f"{len(self.problems)} problems in the configuration", *listed])
        super().__init__(text)

    @property
    def located(self) -> list[str]:
        """Each problem with its file and line, as far as these are known."""
        if not self.source:
            return list(self.problems)
        places = (f"{self.source}:{line}" if line else self.source for line in self.lines)
        return [f"{place}: {problem}" for place, problem in zip(places, self.problems, strict=True)]


@dataclass(frozen=True, slots=True)
class _Located:
    """One of pydantic's errors at the key a user would name."""

    path: KeyPath
    value: Any
    union: KeyPath | None
    """Path of the outermost union that the value failed, if any."""
    member: str
    """Which of that union's members this error is about."""
    details: ErrorDetails


def nearest(word: str, known: Iterable[str], count: int = 3) -> list[str]:
    by_lower = {name.lower(): name for name in known}
    return [by_lower[name] for name in difflib.get_close_matches(word.lower(), list(by_lower), n=count, cutoff=_NEAR)]


def problems_of(error: ValidationError, model: type[Config], data: Mapping[str, Any]) -> list[str]:
    """Texts of a `ConfigError`: one for each wrong key, in the order of the data."""
    return list(located_problems(error, model, data))


def located_problems(error: ValidationError, model: type[Config], data: Mapping[str, Any]) -> dict[str, KeyPath]:
    """As `problems_of`, each with the path of its key."""
    located = _closest_members([_locate(details, model, data) for details in error.errors(include_url=False)])
    by_key: dict[tuple[KeyPath, bool], list[_Located]] = {}
    for item in located:
        mergeable = item.details["type"] in _EXPECTED
        by_key.setdefault((item.path, mergeable), []).append(item)
    found = dict[str, KeyPath]()
    for (path, mergeable), items in by_key.items():
        for text in _lines(items, mergeable, model, data):
            found.setdefault(text, path)
    return found


def failed_keys(error: ValidationError, model: type[Config], data: Mapping[str, Any], kind: str) -> set[KeyPath]:
    """The keys with an error of pydantic's type `kind`."""
    located = (_locate(details, model, data) for details in error.errors(include_url=False))
    return {item.path for item in located if item.details["type"] == kind}


def _locate(details: ErrorDetails, model: type[Config], data: Mapping[str, Any]) -> _Located:
    """Pydantic's location without the union members that it names between the keys."""
    node: Any = data
    options: tuple[Any, ...] = (model,)
    path: KeyPath = ()
    union: KeyPath | None = None
    member = ""
    for part in details["loc"]:
        if members_of(options) is not None:  # then the part is not a key, but the model's word
            options = chosen(options, cast(object, node))
            continue
        is_entry = isinstance(node, Mapping) and part in node
        is_item = isinstance(node, list | tuple) and isinstance(part, int)
        is_field = any(is_config(option) and part in option.model_fields for option in options)
        if is_entry or is_item or is_field:
            path = (*path, part)
            node = cast(Any, node)[part] if is_entry or is_item else None
            options = child_options(options, part)
        elif union is None:
            union, member = path, str(part)
    return _Located(path, node, union, member, details)


def _closest_members(located: list[_Located]) -> list[_Located]:
    """Errors without those of improbable members: if a value failed every member of a union, only those
    of the most likely member are kept."""
    unions: dict[KeyPath, dict[str, list[_Located]]] = {}
    for item in located:
        if item.union is not None:
            unions.setdefault(item.union, {}).setdefault(item.member, []).append(item)
    kept: list[_Located] = [item for item in located if item.union is None]
    for path, members in unions.items():
        deeper = [items for items in members.values() if all(len(item.path) > len(path) for item in items)]
        kept += min(deeper, key=len) if deeper else [item for items in members.values() for item in items]
    order = {id(item): index for index, item in enumerate(located)}
    return sorted(kept, key=lambda item: order[id(item)])


def _lines(items: list[_Located], mergeable: bool, model: type[Config], data: Mapping[str, Any]) -> list[str]:
    if not mergeable:
        return [line for item in items for line in _own_lines(item, model, data)]
    expected = " or ".join(dict.fromkeys(_expected(item.details) for item in items))
    key = path_text(items[0].path)
    return [f"{key or 'the configuration'} = {show(items[0].value)}: expected {expected}{_how_to_write(items[0], key, model, data)}"]


def _how_to_write(item: _Located, key: str, model: type[Config], data: Mapping[str, Any]) -> str:
    """Advice on how to write a word that is not one of those expected, a list that was set to its only item, and a table that was set to
    true or to the text that one of its keys is for."""
    if item.details["type"] in ("literal_error", "enum") and isinstance(item.value, str):
        words = re.findall(r"'([^']*)'", str(item.details.get("ctx", {}).get("expected", "")))
        near = nearest(item.value, words, 1)
        return f"; did you mean {near[0]}?" if near else ""
    if item.details["type"] in ("list_type", "tuple_type") and isinstance(item.value, str | int | float):
        return f"; write {_as_typed(key, item.value)}"
    tables = [option for option in options_at(model, item.path, data) if is_config(option)]
    if len(tables) != 1 and members_of(tuple(tables)) is None:
        return ""
    if isinstance(item.value, str):
        named = [name for name in ("path", "train", "name") if name in tables[0].model_fields]
        return f"; did you mean {key}.{named[0]}={item.value}?" if named else ""
    if item.value is not True:
        return ""
    return f": write {key}={{}} for what it is by default, or set its keys ({', '.join(fields_of(tables[0]))})"


def _as_typed(key: str, value: str | float) -> str:
    """A list of one value for the command line. Of a text in brackets the shell took the quotes."""
    if isinstance(value, str) and value[:1] == "[" and value[-1:] == "]":
        return f"'{key}={show([part.strip() for part in value[1:-1].split(',')])}', with the outer quotes for the shell"
    return f"{key}={show([value])}"


def _expected(details: ErrorDetails) -> str:
    return _EXPECTED[details["type"]].format_map(details.get("ctx", {}))


def _own_lines(item: _Located, model: type[Config], data: Mapping[str, Any]) -> list[str]:
    """The lines about one error: several if a table is in the wrong place."""
    if item.details["type"] == "extra_forbidden":
        if known := _of_a_member(item, model, data):
            return known
        hints = _hints(item.path, model, data)
        of_a_run = "model" in model.model_fields  # for names elsewhere are those of a whole run's settings
        clear = len(item.path) > 1 or not hints.startswith("there is")
        if of_a_run and clear and (known := _answer(path_text(item.path), path_text(item.path))):
            return [f"{path_text(item.path)}: unknown key; {known}"]
        if (not hints or isinstance(item.value, Mapping)) and (lines := _elsewhere(item)):
            return lines
        if not hints or (len(item.path) > 1 and hints.startswith("there is")):  # a key of that name elsewhere may be another thing
            hints = "; ".join([_keys_here(item.path, model, data), *filter(None, [hints])])
        return [f"{path_text(item.path)}: unknown key; {hints}"]
    if item.details["type"] in _NO_MEMBER:
        return [_no_member(item, model, data)]
    return [_line(item, model, data)]


def _answer(name: str, key: str) -> str | None:
    """The answer to a name of slime, verl or TRL that is at a key; None: they have no such name, or the key itself would be the answer,
    since another command of whet has it."""
    known = known_elsewhere(name)
    return None if known is not None and key in known.split(" (")[0].removeprefix("in whet it is ").split(", ") else known


def _elsewhere(item: _Located) -> list[str]:
    """Lines about a key that slime, verl or TRL has, or about a table of such keys; empty if none of them is known."""
    paths = [(*item.path, *path) for path in _leaves(item.value)]
    keys = {path_text(path): str(path[-1]) for path in paths}
    answers = {key: _answer(key, key) or _answer(leaf, key) for key, leaf in keys.items()}
    if not any(answers.values()):
        return []
    return [f"{key}: unknown key" + (f"; {words}" if words else "") for key, words in answers.items()]


def _no_member(item: _Located, model: type[Config], data: Mapping[str, Any]) -> str:
    """A table chooses no model, or there is no table."""
    members = members_of(options_at(model, item.path, data))
    assert members is not None, "pydantic says so of choices alone"
    key = path_text(item.path)
    value = cast(object, item.value)
    if not isinstance(value, Mapping):
        return f"{key} = {show(value)}: expected a table{_how_to_write(item, key, model, data)}"
    word = child_of(cast(object, value), members.key)
    expected = f"expected one of {', '.join(members.words)}"
    if word is None:
        return f"{key}.{members.key}: is required and not set; {expected}"
    near = nearest(word, members.by_word) if isinstance(word, str) else []
    return f"{key}.{members.key} = {show(word)}: {expected}" + (f"; did you mean {' or '.join(near)}?" if near else "")


def _of_a_member(item: _Located, model: type[Config], data: Mapping[str, Any]) -> list[str]:
    """Lines about a key that belongs to a choice's models, but not here; empty if it belongs to none."""
    above, leaf = item.path[:-1], str(item.path[-1])
    table, key = node_at(data, above), path_text(above)
    members = members_of(options_at(model, above, data))
    if members is None or not isinstance(table, Mapping):
        return []
    says = f"{key}.{members.key} is {show(members.word_of(cast(object, table)))}"
    if leaf in members.by_word:
        return _below_a_word(item, members, key, says, leaf)
    readers = [word for word in members.words if leaf in _model(members, word).model_fields]
    if not readers:
        return []
    several = f" and {len(readers) - _MAX_ELSEWHERE} others" if len(readers) > _MAX_ELSEWHERE else ""
    return [f"{path_text(item.path)} is a setting of {', '.join(readers[:_MAX_ELSEWHERE])}{several}; {says}"]


def _below_a_word(item: _Located, members: Members, key: str, says: str, word: str) -> list[str]:
    """Lines about a table that is named as one of the models: its content belongs one table higher."""
    is_chosen = says.endswith(f" {show(word)}")
    why = f"the settings of {word} stand in [{key}] itself" + ("" if is_chosen else f", and {says}")
    fields = _model(members, word).model_fields
    leaves = _leaves(item.value)
    if len(leaves) > _MAX_SINGLE_KEYS:
        return [f"{path_text(item.path)}: {why}; write\n{_table_of(item, leaves, members.key, key, word, fields)}"]
    lines: list[str] = []
    for path in leaves:
        name = path[0] if path else members.key
        near = [name] if name in fields else nearest(name, fields, 1)
        new = path_text((*item.path[:-1], *near, *path[1:]))
        also = "" if is_chosen else f"{key}.{members.key}={word}"
        write = " and ".join(part for part in (also, new if near and path else "") if part)
        lines.append(f"{path_text((*item.path, *path))}: {why}; " + (f"write {write}" if write else f"leave out [{path_text(item.path)}]"))
    return lines


def _table_of(item: _Located, leaves: list[tuple[str, ...]], choice: str, key: str, word: str, fields: Mapping[str, Any]) -> str:
    """The content of a table that is named as a model, in the table above it."""
    lines = [f"[{key}]", f"{choice} = {show(word)}"]
    for path in leaves:
        near = [] if path[0] in fields else nearest(path[0], fields, 1)
        lines.append(f"{path_text((*(near or path[:1]), *path[1:]))} = {show(node_at(item.value, path))}")
    return "\n".join(lines)


def _leaves(value: object) -> list[tuple[str, ...]]:
    """Paths of the values in a table; the table's own path if it is empty, or no table."""
    if not isinstance(value, Mapping) or not value:
        return [()]
    return [(key, *rest) for key, item in cast(Mapping[str, object], value).items() for rest in _leaves(item)]


def _model(members: Members, word: str) -> type[Config]:
    model = members.by_word.get(word, members.own)
    assert model is not None, word
    return model


def _line(item: _Located, model: type[Config], data: Mapping[str, Any]) -> str:
    key, kind = path_text(item.path), item.details["type"]
    if kind == "missing":
        return f"{key}: is required and not set ({_wanted(item.path, model, data)})"
    if kind in ("value_error", "assertion_error"):
        text = str(item.details.get("ctx", {}).get("error", item.details["msg"]))
    else:
        text = item.details["msg"].replace("Input should", "it should")
    if not key:
        return text
    return f"{key}: {text}" if isinstance(item.value, Mapping) else f"{key} = {show(item.value)}: {text}"


def _wanted(path: KeyPath, model: type[Config], data: Mapping[str, Any]) -> str:
    """The type of a required key and, where it has one, its help text."""
    text = type_text(options_at(model, path, data))
    for option in chosen(options_at(model, path[:-1], data), node_at(data, path[:-1])):
        field = option.model_fields.get(str(path[-1])) if is_config(option) else None
        if field is not None:
            return f"{type_text(options_of(field.annotation))}: {field.description}" if field.description else text
    return text


def _siblings(path: KeyPath, model: type[Config], data: Mapping[str, Any]) -> list[str]:
    tables = [option for option in chosen(options_at(model, path[:-1], data), node_at(data, path[:-1])) if is_config(option)]
    return list(dict.fromkeys(name for option in tables for name in fields_of(option)))


def _hints(path: KeyPath, model: type[Config], data: Mapping[str, Any]) -> str:
    """Keys of the settings that an unknown key may stand for; empty if none is close."""
    leaf = str(path[-1])
    hints: list[str] = []
    if near := nearest(leaf, _siblings(path, model, data)):
        hints.append(f"did you mean {' or '.join(path_text((*path[:-1], name)) for name in near)}?")
    elsewhere = dict.fromkeys(path_text(known) for known in key_paths(model) if known[-1] == leaf)
    if 0 < len(elsewhere) <= _MAX_ELSEWHERE:
        hints.append(f"there is {' and '.join(elsewhere)}")
    return "; ".join(hints)


def _keys_here(path: KeyPath, model: type[Config], data: Mapping[str, Any]) -> str:
    return f"the keys here are {', '.join(_siblings(path, model, data))}"


def show(value: Any, limit: int = 80) -> str:
    """A value as TOML writes it, cut to `limit` characters."""
    try:
        text = toml_value(value)
    except ValueError:
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
