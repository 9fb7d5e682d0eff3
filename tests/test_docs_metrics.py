"""docs/metrics.md names every metric that the code logs, and no other."""

import ast
import re
from fnmatch import fnmatchcase
from pathlib import Path

from whet.data.special import SPELLED_METRIC
from whet.env.rollout import CUT_BY_ANSWER
from whet.rollout import token_account
from whet.types import Outcome

ROOT = Path(__file__).resolve().parents[1]
NAME = re.compile(r"[a-z_*@]+(/[a-z0-9_*@]+)*")
KINDS = {"Mean", "Max", "Min", "Total", "Last", "_mean", "mean", "distribution"}
"""Makers of metrics."""
CONSTANTS = {"SPELLED_METRIC": SPELLED_METRIC, "CUT_BY_ANSWER": CUT_BY_ANSWER}
CONSTANTS |= {name: getattr(token_account, name) for name in ("SAMPLED", "CARRIED", "TRAINED", "HELD", "DROPPED", "UNACCOUNTED")}
PREFIXES = {"evaluate/evaluation.py": "eval/*/"}
"""Beginning of the names of a file."""
NO_METRICS = {"*/*", "master/*"}
"""Keys of an optimizer's state."""


def template(node):
    """A string with `*` for what is filled in; None: the node is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return CONSTANTS.get(node.id)
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else template(part.value) or "*" for part in node.values)
        return "".join(str(part) for part in parts)
    return None


def pairs(tree):
    """Every key and value of tables, and of assignments to a key."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from ((key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None)
        elif isinstance(node, ast.DictComp):
            yield node.key, node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            yield node.targets[0].slice, node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "distribution":
            yield node.args[0], node


def logged():
    """The names of metrics in the code, with `*` for what is filled in."""
    found = set()
    for path in (ROOT / "whet").rglob("*.py"):
        file = str(path.relative_to(ROOT / "whet"))
        text = path.read_text()
        if "observe.metrics import" not in text or file.startswith(("plan/", "api/", "view/", "quickstart/")):
            continue
        for key, value in pairs(ast.parse(text)):
            name = template(key)
            if name is None or not NAME.fullmatch(name):
                continue
            made = getattr(getattr(value, "func", None), "id", "")
            if "/" in name or made in KINDS:
                name = name if name.startswith("eval/") else f"{PREFIXES.get(file, '')}{name}"
                found |= {f"{name}/{part}" for part in ("mean", "min", "max")} if made == "distribution" else {name}
    return found - NO_METRICS


def entries():
    """The names of the page, with `*` for what is filled in."""
    rows = re.findall(r"^\| (`.+?`) \|(.*)$", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    assert all(row.count("|") == 4 and all(cell.strip() for cell in row.split("|")[:4]) for _, row in rows), "every cell says something"
    names = [name for cells, _ in rows for name in re.findall("`([^`]+)`", cells)]
    assert len(names) == len(set(names))
    return {re.sub("<[^>]+>", "*", name) for name in names}


def test_every_metric_that_the_code_logs_has_an_entry():
    names, known = logged(), entries()
    assert len(names) > 80
    assert {name for name in names if not any(fnmatchcase(name, entry) or fnmatchcase(entry, name) for entry in known)} == set()


def test_every_entry_is_a_metric_that_the_code_logs():
    names = logged()
    outcomes = {f"outcome/{outcome.value}" for outcome in Outcome if outcome.valid}
    assert "outcome/*" in names and outcomes <= entries()
    assert entries() - names == outcomes
