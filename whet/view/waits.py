"""Seconds that the trajectories of a run waited, by cause, rollout by rollout."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute

from whet.view.folders import ViewedRun, rollouts_of
from whet.view.index import UNREADABLE, file_reader, record_path

pc: Any = compute
PARTS = ("queue", "prefill", "decode")
"""Parts of the engine's seconds, where the engine reports them."""
MOST_ROLLOUTS = 120
READ_S = 1.0
"""Seconds after which no older rollout is read."""


def waits_of(run: ViewedRun) -> list[dict[str, Any]]:
    """For each of the newest rollouts, in their order: how many trajectories were played, and the mean seconds of each by cause.

    The parts of the engine's seconds stand for themselves, and `engine` is what is left of it.
    """
    end = time.monotonic() + READ_S
    out: list[dict[str, Any]] = []
    for rollout in reversed(rollouts_of(run)[-MOST_ROLLOUTS:]):
        try:
            with file_reader(record_path(run, rollout)) as reader:
                rows = reader.read([name for name in ("order", "timings") if name in reader.schema_arrow.names])
        except UNREADABLE:  # its records are gone or broken; the view of its groups says so
            continue
        if rows.num_columns == 2 and (found := _means(rows)):
            out.append({"rollout": rollout, "trajectories": found[0], "seconds": found[1]})
        if time.monotonic() > end:
            break
    return out[::-1]


def _means(rows: pa.Table) -> tuple[int, dict[str, float]] | None:
    """Number of trajectories, and the mean of each cause; a trajectory's first row counts."""
    rows = rows.filter(pc.equal(pc.fill_null(rows["order"], 0), 0))
    timings = rows["timings"].combine_chunks()
    if not len(rows):
        return None
    values = timings.items.to_numpy(zero_copy_only=False)
    totals: dict[str, float] = defaultdict(float)
    for name, seconds in zip(timings.keys.to_pylist(), np.nan_to_num(values, posinf=0.0, neginf=0.0).tolist(), strict=True):
        totals[name] += seconds
    if "engine" in totals:
        totals["engine"] = max(0.0, totals["engine"] - sum(totals[part] for part in PARTS))
    return len(rows), {name: seconds / len(rows) for name, seconds in totals.items() if seconds > 0}
