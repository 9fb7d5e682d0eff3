"""Index of the records: a row for each trajectory, small enough that all of a long run are read at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from whet.observe.records.files import INDEX, record_files
from whet.observe.records.schema import check_version

INDEX_SCHEMA = pa.schema(
    [
        ("rollout_id", pa.int64()),
        ("group", pa.int32()),
        ("task_id", pa.string()),
        ("trajectory", pa.string()),
        ("reward", pa.float64()),
        ("outcome", pa.string()),
        ("num_tokens", pa.int64()),
        ("num_turns", pa.int32()),
        ("dropped", pa.string()),
        ("baseline", pa.bool_()),
        ("mean_abs_advantage", pa.float64()),
        ("error", pa.string()),
        ("file", pa.string()),
        ("row_group", pa.int32()),
        ("row", pa.int64()),
        ("num_rows", pa.int32()),
        ("roles", pa.list_(pa.string())),
        ("role_rewards", pa.list_(pa.float64())),
    ]
)
"""The columns of the index. `num_tokens` are sampled ones; `row` is the trajectory's first row in its file, `num_rows` how many it has.
`roles` are those of its samples, null where it has none, and `role_rewards` their rewards."""
READ = [
    "rollout_id",
    "group",
    "task_id",
    "trajectory",
    "reward",
    "outcome",
    "turns",
    "dropped",
    "baseline",
    "mean_abs_advantage",
    "error",
    "role",
]
"""Columns of the records that the index is made of."""
THREADS = 8
"""Index files that are read at a time."""


def index_of(table: pa.Table, file: str, row_groups: Sequence[int]) -> pa.Table:
    """The index of a record file.

    Args:
        table: its rows, with the columns of `READ` as far as it has them.
        file: its name.
        row_groups: number of rows in each of its row groups.
    """
    bounds = list(_trajectories(table))
    first = np.array([start for start, _ in bounds], np.int64)
    sampled, turns = _lengths(table.column("turns").combine_chunks()) if table.num_rows else (np.zeros(0), np.zeros(0))
    out: dict[str, Any] = {name: table.column(name).take(first) for name in table.column_names if name in INDEX_SCHEMA.names}
    errors = out["error"].combine_chunks() if table.num_rows else pa.array([], table.schema.field("error").type)
    out["error"] = errors.flatten()[errors.type.get_field_index("kind")]
    if "mean_abs_advantage" in out:
        sizes = table.column("mean_abs_advantage").to_pylist()
        out["mean_abs_advantage"] = [_mean([x for x in sizes[start:end] if x is not None]) for start, end in bounds]
    if "role" in table.column_names:
        named = list(zip(table.column("role").to_pylist(), table.column("reward").to_pylist(), strict=True))
        found = [{role: reward for role, reward in named[start:end] if role is not None} for start, end in bounds]
        out |= {"roles": [list(each) or None for each in found], "role_rewards": [list(each.values()) or None for each in found]}
    ends = np.cumsum(row_groups)
    out |= {
        "num_tokens": sampled[first] if len(first) else [],
        "num_turns": turns[first] if len(first) else [],
        "file": [file] * len(first),
        "row_group": np.searchsorted(ends, first, side="right"),
        "row": first,
        "num_rows": [end - start for start, end in bounds],
    }
    columns = [_cast(out[field.name], field.type) if field.name in out else pa.nulls(len(first), field.type) for field in INDEX_SCHEMA]
    return pa.table(columns, schema=INDEX_SCHEMA)


def read_index(folder: Path) -> pa.Table:
    """The index of a folder of records, in the order of the rollouts.

    A record file without an index file (a crash came between the two, or an older whet wrote it) is indexed from its rows.

    Raises:
        ValueError: there are no records, or those of a newer version of whet.
    """
    folder = Path(folder)
    indexed = {path.name: path for path in record_files(folder / INDEX)}
    missing = [path for path in record_files(folder) if path.name not in indexed]
    if not indexed and not missing:
        raise ValueError(f"no records at {folder}: expected a run's folder, or its {folder.name}/ with rollout_*.parquet files")
    with ThreadPoolExecutor(THREADS) as pool:
        tables = [*pool.map(read_index_file, indexed.values()), *pool.map(index_of_file, missing)]
    return pa.concat_tables(tables).sort_by("rollout_id") if missing else pa.concat_tables(tables)


def index_of_file(path: Path) -> pa.Table:
    """The index of a record file, from its rows."""
    with pq.ParquetFile(path) as reader:
        check_version(reader.schema_arrow, path)
        columns = [name for name in READ if name in reader.schema_arrow.names]
        counts = [reader.metadata.row_group(i).num_rows for i in range(reader.num_row_groups)]
        return index_of(reader.read(columns), path.name, counts)


def read_index_file(path: Path, names: Sequence[str] = INDEX_SCHEMA.names) -> pa.Table:
    """Columns of one index file.

    Raises:
        ValueError: a newer version of whet wrote it.
    """
    with pq.ParquetFile(path) as reader:
        check_version(reader.schema_arrow, path)
        kinds = pa.schema([INDEX_SCHEMA.field(name) for name in names])
        table = reader.read([name for name in names if name in reader.schema_arrow.names], use_threads=False).replace_schema_metadata()
        for name in names:
            if name not in table.column_names:  # an older whet wrote it
                table = table.append_column(name, pa.nulls(table.num_rows, kinds.field(name).type))
        return table.select(names).cast(kinds)


def _trajectories(table: pa.Table) -> Iterator[tuple[int, int]]:
    """The first row of each trajectory and the row after its last."""
    names = list(zip(table.column("group").to_pylist(), table.column("trajectory").to_pylist(), strict=True))
    start = 0
    for i in range(1, len(names) + 1):
        if i == len(names) or names[i] != names[start]:
            yield start, i
            start = i


def _lengths(turns: pa.ListArray) -> tuple[Any, Any]:
    """Sampled tokens and turns of each row."""
    ends = np.asarray(turns.offsets)
    counts = np.asarray(turns.values.field("num_tokens"), np.int64)
    return np.diff(np.concatenate([[0], np.cumsum(counts)])[ends]), np.diff(ends)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _cast(values: Any, kind: pa.DataType) -> Any:
    if isinstance(values, pa.ChunkedArray | pa.Array):
        return values.cast(kind)
    return pa.array(values, kind)
