"""What a run of these tests recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """All rows of a run's records, after they were looked at: what was sampled trains, and nothing else does."""
    rows = [row for path in sorted((run_dir / "rollouts").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    for row in rows:
        if row["loss_mask"] is not None:
            assert [origin == 1 for origin in row["origin"]] == row["loss_mask"]
    return rows


def counted(rows: list[dict[str, Any]], name: str) -> int:
    """The events of this name, of all trajectories."""
    found = {(row["rollout_id"], row["trajectory"]): dict(row["counts"]).get(name, 0) for row in rows}
    return sum(found.values())
