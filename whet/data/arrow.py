"""Rows of Arrow as JSON has them: a struct's fields that are not there are left out, a map is an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from whet.types import JSON

if TYPE_CHECKING:
    import pyarrow as pa

Clean = Callable[[Any], JSON]


def row_cleaner(schema: pa.Schema) -> Callable[[dict[str, Any]], dict[str, JSON]]:
    """A function that turns rows of a schema, as Arrow gives them, into the form of the same rows in
    jsonl.

    A struct has the fields of all rows, with null if a row does not have the field: such a null is no
    value, at any depth. A field of the type null has no value anywhere, so that only a null that
    somebody wrote can have made it: it stays. Columns keep their nulls.
    """
    cleaners = {field.name: clean for field in schema if (clean := _cleaner(field.type)) is not None}

    def clean_row(row: dict[str, Any]) -> dict[str, JSON]:
        return {**row, **{name: clean(row[name]) for name, clean in cleaners.items()}}

    return clean_row


def _cleaner(kind: pa.DataType) -> Clean | None:
    """A function that cleans values of a type; None: they need no cleaning."""
    from pyarrow import types

    if types.is_struct(kind):
        return _struct_cleaner(kind)
    if types.is_map(kind):
        item = _cleaner(kind.item_type) or _same
        return lambda value: None if value is None else {key: item(each) for key, each in value}
    if types.is_nested(kind) and not types.is_union(kind):
        each = _cleaner(kind.value_type)
        return None if each is None else lambda value: None if value is None else [each(item) for item in value]
    return None


def _struct_cleaner(kind: pa.DataType) -> Clean:
    from pyarrow import types

    fields = [kind.field(i) for i in range(kind.num_fields)]
    cleaners = {field.name: _cleaner(field.type) or _same for field in fields}
    written = {field.name for field in fields if types.is_null(field.type)}

    def clean(value: dict[str, Any] | None) -> JSON:
        if value is None:
            return None
        return {name: cleaners[name](item) for name, item in value.items() if item is not None or name in written}

    return clean


def _same(value: JSON) -> JSON:
    return value
