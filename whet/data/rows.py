"""From a row of a data file to a task: which column means what."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NoReturn, TypeVar

from pydantic import field_validator, model_validator

from whet.config import Config
from whet.data.files import Row, describe_value, paths_text, read_rows
from whet.data.messages import NO_JSON, as_json, messages_from, metadata_from, tools_from
from whet.types import JSON, Message, Task

T = TypeVar("T")
PROMPTS = ("prompt", "question", "instruction", "input", "query")
RESPONSES = ("completion", "response", "answer", "output", "reply")
"""Common names of the columns of prompts and of replies to them."""
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")


class RowConfig(Config):
    """Which column of a row means what. A column that is named otherwise than by default has to exist. `a.b` is the key b of column a."""

    prompt_key: str = "prompt"
    """Column of the prompt: text, or a list of OpenAI messages."""
    prompt_template: str | None = None
    """Builds the prompt from columns instead: each {column} is replaced by the row's value; {{ and }} are braces."""
    system_prompt: str | None = None
    """System message for the prompts that have none."""
    chat: bool | Literal["strip"] = True
    """Render prompts with the chat template. What was sampled stays; "strip": where the template leaves the thinking of earlier turns out,
    the next turn begins a new training sample without it. false: a prompt is text that is used unchanged, without a chat template."""
    label_key: str | None = "label"
    """Column of what is known about the answer: text or a number."""
    label_pattern: str | None = None
    """Regular expression with one group: the part of the label that counts, for example "#### (.+)"."""
    metadata_key: str | None = "metadata"
    """Column of anything a reward or an environment wants to know: an object or a JSON string of one. The other columns that nothing above
    names are part of the metadata, too, under their own names. none: rows bring no metadata."""
    tools_key: str | None = "tools"
    """Column of the tools the row brings along: a list of OpenAI schemas or a JSON string of one."""

    @field_validator("label_pattern")
    @classmethod
    def _has_one_group(cls, pattern: str | None) -> str | None:
        if pattern is None:
            return None
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"expected one group in parentheses, found {groups}")
        return pattern

    @model_validator(mode="after")
    def _fits_together(self) -> RowConfig:
        if self.label_pattern is not None and self.label_key is None:
            raise ValueError("label_pattern needs a label_key to be applied to")
        if self.system_prompt is not None and not self.chat:
            raise ValueError("system_prompt needs chat = true: without chat a prompt has no messages")
        return self


def renamed_columns(config: Config, *keys: str) -> dict[str, str]:
    """The optional keys with another column than the default, with that column: it has to exist."""
    chosen = {key: getattr(config, key) for key in keys}
    defaults = {key: type(config).model_fields[key].default for key in keys}
    return {key: name for key, name in chosen.items() if name not in (None, defaults[key])}


def read_all(path: str | Sequence[str], required: Mapping[str, str], parse: Callable[[Row], T]) -> list[T]:
    """Every row of a source, parsed, in order.

    Args:
        path: as for `read_rows`.
        required: settings and the columns that they name; a column is there if any row has it.
        parse: makes an object of a row.

    Raises:
        ValueError: a file cannot be read, `parse` refuses a row (`file:line`), a column is in no row, or there are no rows.
    """
    where, columns = paths_text(path), dict[str, None]()
    found: list[T] = []
    for row in read_rows(path):
        columns.update(dict.fromkeys([*row.values, *(name for name in required.values() if row.has(name))]))
        found.append(parse(row))
    if not found:
        raise ValueError(f"there are no rows in {where}: a file is empty, or a slice leaves none")
    for key, name in required.items():
        if name not in columns:
            fail_missing(where, key, name, columns)
    return found


def task_from(row: Row, config: RowConfig, id: str) -> Task:
    """The task that a row describes.

    Raises:
        ValueError: a column is missing or holds what it should not; the text starts with `file:line`.
    """
    return Task(
        id=id,
        prompt=_prompt(row, config),
        label=_label(row, config),
        metadata={} if config.metadata_key is None else {**_other_columns(row, config), **_metadata(row, config.metadata_key)},
        tools=tools_from(_optional(row, config.tools_key), _column(row, config.tools_key)),
        origin=row.origin,
    )


def _metadata(row: Row, name: str) -> Mapping[str, JSON]:
    return metadata_from(row.get(name), _column(row, name))


def _other_columns(row: Row, config: RowConfig) -> dict[str, JSON]:
    """Columns of a row outside the task: all except those that are wholly the prompt, the label, the
    tools or the metadata. Values that JSON does not have (bytes) are left out, and a date is text."""
    whole = {config.metadata_key, config.tools_key}
    whole |= {config.prompt_key} if config.prompt_template is None else set[str]()
    whole |= {config.label_key} if config.label_pattern is None else set[str | None]()
    found = {name: as_json(value) for name, value in row.values.items() if name not in whole}
    return {name: value for name, value in found.items() if value is not NO_JSON}


def missing_label(path: str | Sequence[str], label_key: str | None) -> str:
    """Message for rows without labels if the column of labels is missing: the columns that exist. "" if
    the column exists."""
    first = next(read_rows(path))
    columns = first.values
    if label_key is None or first.has(label_key):
        return ""
    return f"\nthere is no column {label_key!r} (data.label_key) in {paths_text(path)}; the columns are {', '.join(columns)}"


def fail_missing(where: str, key: str, name: str, columns: Iterable[str]) -> NoReturn:
    """Raises the error for a column that is not there: `key` is the setting that names it."""
    columns = list(columns)
    near = difflib.get_close_matches(name, columns, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else _two_columns(columns) if key == "messages_key" else ""
    raise ValueError(f"{where}: there is no column {name!r} ({key}); the columns are {', '.join(columns)}{hint}")


def _two_columns(columns: Sequence[str]) -> str:
    """Advice on the settings that take a prompt and its reply from two columns."""
    prompt = next((name for name in PROMPTS if name in columns), None)
    response = next((name for name in RESPONSES if name in columns), None)
    if prompt is None or response is None:
        return "; if prompts and replies have columns of their own, name them in data.prompt_key and data.response_key"
    return f"; write data.prompt_key={prompt} data.response_key={response}"


def _column(row: Row, name: str | None) -> str:
    return f"{row.origin}: column {name!r}"


def _optional(row: Row, name: str | None) -> JSON:
    return None if name is None else row.get(name)


def _prompt(row: Row, config: RowConfig) -> tuple[Message, ...] | str:
    where = _column(row, config.prompt_key)
    if config.prompt_template is not None:
        where = f"{row.origin}: the prompt from prompt_template"
        value: JSON = _fill(config.prompt_template, row)
    elif row.has(config.prompt_key):
        value = row.get(config.prompt_key)
    else:
        fail_missing(row.origin, "prompt_key", config.prompt_key, row.values)
    if value == "":
        raise ValueError(f"{where} is empty text")
    if not config.chat:
        if not isinstance(value, str):
            raise ValueError(f"{where} holds {describe_value(value)}, expected text (chat = false)")
        return value
    if isinstance(value, str):
        messages: tuple[Message, ...] = (Message("user", value),)
    elif isinstance(value, list):
        messages = messages_from(value, where)
    else:
        raise ValueError(f"{where} holds {describe_value(value)}, expected text or a list of messages")
    if config.system_prompt is not None and all(message.role != "system" for message in messages):
        return (Message("system", config.system_prompt), *messages)
    return messages


def _fill(template: str, row: Row) -> str:
    """The template with each {column} replaced, once: braces in a row's own text mean nothing."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return match[0][0]
        if not row.has(name):
            fail_missing(row.origin, f"prompt_template; write {{{{{name}}}}} for braces", name, row.values)
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ValueError(f"{_column(row, name)} holds {describe_value(value)}, expected text or a number")
        return str(value)

    return _PLACEHOLDER.sub(replace, template)


def _label(row: Row, config: RowConfig) -> str | None:
    if config.label_key is None:
        return None
    value: JSON = row.get(config.label_key)
    where = _column(row, config.label_key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, str | int | float)):
        advice = "; with data.label_key=none a reward finds it in trajectory.task.metadata" if isinstance(value, list | dict) else ""
        raise ValueError(f"{where} holds {describe_value(value)}, expected text or a number{advice}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where} holds {value}, expected text or a finite number; write null where there is no label")
    if config.label_pattern is None:
        return None if value is None else str(value)
    if not row.has(config.label_key):
        fail_missing(row.origin, "label_key", config.label_key, row.values)
    match = re.search(config.label_pattern, "" if value is None else str(value))
    if match is None or match[1] is None:
        shown = describe_value(value)
        raise ValueError(f"{where} holds {shown}, which does not match label_pattern {config.label_pattern!r}")
    return match[1]
