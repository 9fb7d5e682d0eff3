"""Prints the table of docs/house.md: how large the package is, and what its tests hold about its form.

    python docs/measure_house.py
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def settings() -> int:
    """Number of settings of `whet train`."""
    command = [sys.executable, "-m", "whet", "train", "--keys"]
    keys = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    return len(re.findall(r"^[\w.<>\[\]]+  \(", keys, re.MULTILINE))


def lines(folder: str, suffixes: tuple[str, ...] = (".py",)) -> int:
    """Lines of a folder's files, empty ones and docstrings included."""
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)


def parts_of_lines() -> tuple[int, int, int]:
    """Lines of the package that are code, docstrings or comments, and empty."""
    docs = empty = whole = 0
    for path in (ROOT / "whet").rglob("*.py"):
        text = path.read_text()
        rows = text.splitlines()
        told: set[int] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                told.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for number, row in enumerate(rows, 1):
            docs += number in told or row.lstrip().startswith("#")
            empty += number not in told and not row.strip()
        whole += len(rows)
    return whole - docs - empty, docs, empty


def main() -> None:
    code, docs, empty = parts_of_lines()
    rows = [
        ("settings of `whet train`", settings(), "360"),
        ("lines of the package", lines("whet"), "44,000"),
        ("… of them code", code, ""),
        ("… of them docstrings and comments", docs, ""),
        ("… of them empty", empty, ""),
        ("lines of the tests", lines("tests"), ""),
        ("lines of README.md", len((ROOT / "README.md").read_text().splitlines()), "130"),
    ]
    for name, value, goal in rows:
        print(f"| {name} | {value:,} | {goal} |")


if __name__ == "__main__":
    main()
