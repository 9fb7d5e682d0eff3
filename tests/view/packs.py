"""Packs, read as the page reads them."""

from __future__ import annotations

import json
import struct

import numpy as np


def read_pack(data: bytes):
    """Head and columns."""
    (size,) = struct.unpack("<I", data[:4])
    head = json.loads(data[4 : 4 + size])
    columns = {name: np.frombuffer(data, f"<{kind}", length, 4 + size + start) for name, (kind, start, length) in head["columns"].items()}
    return head, columns
