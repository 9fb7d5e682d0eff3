"""Counts and sizes in words."""

from __future__ import annotations


def several(count: int, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def bytes_text(size: float) -> str:
    """`512 B`, `1.5 KiB`, `23.4 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
