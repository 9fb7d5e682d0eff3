"""The metrics of a run as columns, its failures, and its end."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from whet.view.folders import MAX_TEXT_BYTES, ViewedRun, json_lines, rollouts_of
from whet.view.pack import pack, plain

MOST_FAILURES = 200
MOST_METRICS = 2000
"""Names of metrics that are shown."""


def metrics_pack(run: ViewedRun, start: int) -> bytes:
    """The metrics from a byte of the file on: a column of float64 for each name, NaN where a line has none.

    The head has `next`, the byte to go on from, and `restarted` where the file is shorter than `start`.
    """
    path = run.path("metrics.jsonl")
    if path is None:
        return pack({"next": 0, "names": [], "rows": 0, "restarted": False}, {})
    restarted = path.stat().st_size < start
    lines, end = json_lines(path, 0 if restarted else start)
    names: dict[str, None] = {}
    for line in lines:
        names |= dict.fromkeys(name for name, value in line.items() if isinstance(value, int | float))
    kept = list(names)[:MOST_METRICS]
    columns = {str(i): np.array([_number(line.get(name)) for line in lines], np.float64) for i, name in enumerate(kept)}
    return pack({"next": end, "names": kept, "rows": len(lines), "restarted": restarted}, columns)


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("inf")


def failures_of(run: ViewedRun) -> list[Any]:
    """The first failure of each kind and place."""
    path = run.path("failures.jsonl")
    return [] if path is None else plain(json_lines(path)[0][:MOST_FAILURES])


def summary_of(run: ViewedRun) -> dict[str, Any]:
    """Facts of a run for the list of runs."""
    end, rollouts = _end(run), rollouts_of(run)
    return {
        "name": run.name,
        "algorithm": run.section("algo").get("name"),
        "model": run.section("model").get("path"),
        "planned": run.config().get("num_rollouts"),
        "rollouts": [rollouts[0], rollouts[-1], len(rollouts)] if rollouts else None,
        "metrics": run.path("metrics.jsonl") is not None,
        "failures": len(failures_of(run)),
        "status": end.get("status") if end else None,
        "evaluation": run.folder != run.settings,
        "lesson": run.notes,
    }


def _end(run: ViewedRun) -> dict[str, Any] | None:
    path = run.path("end.json")
    if path is None or path.stat().st_size > MAX_TEXT_BYTES:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    return plain(found) if isinstance(found, dict) else None
