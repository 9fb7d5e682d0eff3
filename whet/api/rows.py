"""Rows that Python code gives as data: a list, a data set, a data frame."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.types import JSON


def is_path(data: object) -> bool:
    """True for what names files: a path, or a list of paths."""
    if isinstance(data, str | Path):
        return True
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(each, str | Path) for each in data)


def check_paths(data: Any) -> None:
    """Refuse a list of texts that name no files.

    Raises:
        ValueError: none of them can be a path.
    """
    if isinstance(data, list | tuple) and not any(Path(each).suffix or "/" in str(each) or Path(each).exists() for each in data):
        raise ValueError('the data are a list of texts, which would name files: write rows, [{"prompt": ..., "label": ...}, ...]')


def rows_text(data: Any, what: str) -> str:
    """The rows as JSON lines.

    Args:
        data: dictionaries, a `datasets.Dataset`, or a frame of pandas or polars.
        what: the name of the argument, for errors.

    Raises:
        ValueError: there are none, or one holds what JSON cannot.
    """
    lines: list[str] = []
    for number, row in enumerate(_records(data, what), start=1):
        if not isinstance(row, Mapping):
            raise ValueError(f"{what}: row {number} is a {type(row).__name__}, expected a dictionary with a key for each column")
        values = {str(name): plain_value(value, f"{what}: row {number}, column {str(name)!r}") for name, value in row.items()}
        lines.append(json.dumps(values, ensure_ascii=False) + "\n")
    if not lines:
        raise ValueError(f"{what} has no rows")
    return "".join(lines)


def _records(data: Any, what: str) -> Iterable[Any]:
    if isinstance(data, Mapping):
        if all(hasattr(value, "column_names") for value in data.values()) and data:  # a datasets.DatasetDict
            raise ValueError(f"{what} has several splits: choose one of {', '.join(map(repr, data))}")
        raise ValueError(f"{what} is a dictionary, expected a list of rows, a data set, a data frame, or the path of a file")
    if hasattr(data, "to_dicts"):  # polars
        return data.to_dicts()
    if hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        return _whole_numbers(data.to_dict(orient="records"))
    if not isinstance(data, Iterable):
        raise ValueError(f"{what}: {data!r:.80} is no rows; expected a list of rows, a data set, a data frame, or the path of a file")
    return data


def _whole_numbers(rows: list[dict[Any, Any]]) -> list[dict[Any, Any]]:
    """The rows of a frame; a column of whole numbers, some of them missing, holds integers again: pandas makes floats of such a column."""

    def is_missing(value: Any) -> bool:
        return value is None or (isinstance(value, float) and math.isnan(value))

    whole = {
        name
        for name in (rows[0] if rows else ())
        if any(is_missing(row[name]) for row in rows)
        and all(is_missing(row[name]) or (isinstance(row[name], float) and row[name].is_integer()) for row in rows)
    }
    return [{name: int(value) if name in whole and not is_missing(value) else value for name, value in row.items()} for row in rows]


def plain_value(value: Any, where: str) -> JSON:
    """A value as JSON has it: missing numbers and dates are null, arrays are lists, dates are text.

    Raises:
        ValueError: it has no form in JSON; `where` says which it is.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, where) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain_value(item, where) for item in value]
    other: Any = value
    if hasattr(other, "tolist"):  # numpy
        return plain_value(other.tolist(), where)
    if hasattr(other, "isoformat"):
        return None if str(other) == "NaT" else other.isoformat()
    if type(value).__name__ == "NAType":  # pandas
        return None
    raise ValueError(f"{where} holds a {type(value).__name__}, which JSON has not: give text, numbers, lists or dictionaries")
