"""Answers as JSON with raw columns behind it: typed arrays in the page, with nothing to parse.

A pack is a little-endian uint32 with the size of the JSON, the JSON, and the columns, each at a multiple of 8 bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

KINDS = {"float64": "f8", "float32": "f4", "int32": "i4", "int8": "i1", "uint8": "u1"}


def pack(head: Mapping[str, Any], columns: Mapping[str, Any]) -> bytes:
    """A pack. Columns are numpy arrays of a type in `KINDS`; `head` is JSON, its NaN and infinity become null."""
    places: dict[str, list[Any]] = {}
    pieces: list[bytes] = []
    size = 0
    for name, column in columns.items():
        array = np.ascontiguousarray(column)
        kind = KINDS[array.dtype.name]
        data = array.astype(f"<{kind}", copy=False).tobytes()
        places[name] = [kind, size, len(array)]
        padding = -len(data) % 8
        pieces += [data, bytes(padding)]
        size += len(data) + padding
    text = json_bytes({**head, "columns": places})
    text += b" " * (-(4 + len(text)) % 8)
    return b"".join([struct.pack("<I", len(text)), text, *pieces])


def json_bytes(value: Any) -> bytes:
    """A value as JSON, its NaN and infinity as null. Half a surrogate pair, which UTF-8 has no bytes for, is an escape of JSON."""
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def plain(value: Any) -> Any:
    """A value that JSON holds: NaN and infinity are null, arrays are lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
