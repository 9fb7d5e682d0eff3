"""Trajectories chosen from the records of a run by their index, and read from where they are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute

from whet.observe.record_query import RecordQuery
from whet.observe.records.files import ROLLOUTS, record_files
from whet.observe.records.index import read_index
from whet.observe.records.schema import CONFIG_KEY, check_version

pc: Any = compute
"""Its functions are made when it is imported, so they have no types."""
SORTS = {"reward": "reward", "tokens": "num_tokens", "turns": "num_turns", "advantage": "mean_abs_advantage", "rollout": "rollout_id"}
"""Columns of the index by the word that sorts by them."""


def records_folder(run: Path) -> Path:
    """The folder of the records that a path means: a run's, an evaluation set's, or the folder itself.

    Raises:
        ValueError: there are no records, with the folders below that have some.
    """
    for folder in (run / ROLLOUTS, run):
        if folder.is_dir() and (record_files(folder) or record_files(folder / "index")):
            return folder
    if not run.exists():
        raise ValueError(f"there is no {run}: give a run's folder (its run_dir)")
    below = sorted({str(path.parent.parent) for path in run.glob(f"**/{ROLLOUTS}/rollout_*.parquet")})
    if not run.is_dir():
        raise ValueError(f"{run} is a file: give a run's folder (its run_dir)")
    none = "a run that learns from given data (sft, dpo, rm) writes none, and neither does one with observe.records.every=0"
    hint = f"these folders below it have some: {', '.join(below[:5])}" if below else none
    raise ValueError(f"{run} has no records; {hint}")


def choose(folder: Path, query: RecordQuery) -> pa.Table:
    """The index of the chosen trajectories.

    Raises:
        ValueError: there are no records, or the query cannot be understood.
    """
    index = read_index(folder)
    if query.role is not None:
        index = _of_role(index, query.role)
    for mask in _masks(index, query):
        index = index.filter(mask)
    if query.sort is not None:
        if query.sort not in SORTS:
            raise ValueError(f"--sort {query.sort}: expected one of {', '.join(SORTS)}")
        order = "ascending" if query.reverse else "descending"
        return index.sort_by([(SORTS[query.sort], order), ("rollout_id", "ascending"), ("group", "ascending")])
    return index.take(list(range(len(index)))[::-1]) if query.reverse else index


def _masks(index: pa.Table, query: RecordQuery) -> list[Any]:
    """At most one mask, of all that was asked for."""
    masks: list[Any] = []
    if query.rollout is not None:
        first, end = _range(query.rollout)
        rollouts = index.column("rollout_id")
        masks += [pc.greater_equal(rollouts, first), pc.less(rollouts, end)]
    if query.task is not None:
        masks.append(pc.match_substring(index.column("task_id"), query.task))
    if query.trajectory is not None:
        masks.append(pc.equal(index.column("trajectory"), query.trajectory))
    if query.outcome is not None:
        known = pc.unique(index.column("outcome")).to_pylist()
        if query.outcome not in known:
            raise ValueError(f"--outcome {query.outcome}: no trajectory has it; there are {', '.join(sorted(known)) or 'none at all'}")
        masks.append(pc.equal(index.column("outcome"), query.outcome))
    if query.dropped is not None:
        masks.append(pc.is_valid(index.column("dropped")) if query.dropped else pc.is_null(index.column("dropped")))
    if query.failed:
        masks.append(pc.is_valid(index.column("error")))
    return [reduce(pc.and_, masks)] if masks else []


def _of_role(index: pa.Table, role: str) -> pa.Table:
    """The trajectories with samples of a role, and its rewards.

    Raises:
        ValueError: no trajectory has it.
    """
    roles, rewards = index.column("roles").to_pylist(), index.column("role_rewards").to_pylist()
    places = [i for i, found in enumerate(roles) if role in (found or ())]
    if not places:
        known = sorted({name for found in roles for name in found or ()})
        raise ValueError(f"--role {role}: no trajectory has it; there are {', '.join(known) or 'none at all'}")
    own = pa.array([rewards[i][roles[i].index(role)] for i in places], pa.float64())
    return index.take(places).set_column(index.schema.get_field_index("reward"), "reward", own)


def _range(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    try:
        start = int(first) if first or not colon else 0
        return start, (int(end) if end else 2**62) if colon else start + 1
    except ValueError:
        raise ValueError(f"--rollout {text}: expected a number, or a range such as 10:20") from None


def read_chosen(folder: Path, index: pa.Table, role: str | None = None) -> Iterator[pa.Table]:
    """The rows of each trajectory of an index, in its order; with a role, those of its samples. Neighbours of one row group are read
    together.

    Raises:
        ValueError: a record file is not there any more.
    """
    places = zip(*(index.column(name).to_pylist() for name in ("file", "row_group", "row", "num_rows")), strict=True)
    for (file, row_group), chosen in groupby(places, key=lambda place: place[:2]):
        path = folder / file
        if not path.exists():
            raise ValueError(f"{path} is not there any more (observe.records.keep, or removed by hand): the index alone is left of it")
        with pq.ParquetFile(path) as reader:
            check_version(reader.schema_arrow, path)
            starts = list(accumulate((reader.metadata.row_group(i).num_rows for i in range(row_group)), initial=0))
            table = reader.read_row_group(row_group)
        for _, _, row, num_rows in chosen:
            rows = table.slice(row - starts[-1], num_rows)
            yield rows if role is None else rows.filter(pc.equal(rows.column("role"), role))


def write_jsonl(folder: Path, index: pa.Table, file: Path, role: str | None = None) -> int:
    """Write the rows of the chosen trajectories as JSON lines; with a role, those of its samples. Returns their number.

    Raises:
        ValueError: the file is there already, or records are not there any more.
    """
    if file.exists():
        raise ValueError(f"{file} is there already; remove it, or choose another name")
    count = 0
    with open(file, "w", encoding="utf-8") as lines:
        for table in read_chosen(folder, index, role):
            for row in table.to_pylist(maps_as_pydicts="strict"):
                lines.write(json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n")
                count += 1
    return count


def plain(value: Any) -> Any:
    """A value that JSON holds: NaN and infinity are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def config_hash_of(file: Path) -> str:
    """The hash of the settings that a record file was written with; "" where it has none."""
    return (pq.read_schema(file).metadata or {}).get(CONFIG_KEY, b"").decode()
