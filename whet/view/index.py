"""The index of a run's records while it goes on, each file of it read again when it changes; and its groups, sorted and filtered."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute

from whet.observe.records.files import INDEX, SUFFIX, file_name, rollout_of
from whet.observe.records.index import INDEX_SCHEMA, index_of_file, read_index_file
from whet.view.folders import ViewedRun, inside

pc: Any = compute
"""Its functions are made when it is imported, so they have no types."""
NAMES = ["rollout_id", "group", "task_id", "trajectory", "reward", "outcome", "num_tokens", "num_turns", "dropped", "baseline", "error"]
GROUPED = ["rollout_id", "group", "task_id", "reward", "outcome", "num_tokens", "dropped", "baseline"]
"""Columns that groups are summed up from."""
BLOCK = 100
"""Files of the index that are read at a time."""
UNREADABLE = (ValueError, pa.ArrowException, OSError, KeyError)
"""Errors of a file that another program wrote or cut."""
LEAST_STD = 1e-6
"""Scores that differ by less have nothing to compare."""


class IndexFile(NamedTuple):
    """A file of the index, as it was when the folder was read."""

    path: Path
    indexed: bool
    """False: it is a record file, whose index is made from its rows."""
    changed_ns: int
    size: int


class RunIndex:
    """The index of a run.

    Args:
        run: the run.
    """

    def __init__(self, run: ViewedRun) -> None:
        self._run = run
        self._files: dict[int, tuple[tuple[int, int], pa.Table]] = {}
        self._lock = threading.Lock()
        self._grouped: dict[int, IndexFile] = {}
        self._broken: list[int] = []
        self._groups = groups_of_index(INDEX_SCHEMA.empty_table())

    def of(self, rollout: int) -> pa.Table:
        """The index of one rollout.

        Raises:
            ValueError: it is not there.
        """
        folder = self._run.records()
        name = file_name(rollout)
        indexed = None if folder is None else inside(self._run.root, folder / INDEX / name)
        record = None if folder is None else inside(self._run.root, folder / name)
        path = indexed or record
        if path is None:
            raise ValueError(f"rollout {rollout} of {self._run.name} is not recorded")
        status = path.stat()
        key = (status.st_mtime_ns, status.st_size)
        known = self._files.get(rollout)
        if known is None or known[0] != key:
            try:
                table = read_index_file(path) if indexed else index_of_file(path)
            except pa.ArrowException as error:
                raise ValueError(f"the index of rollout {rollout} is no whole file, another program wrote or cut it: {error}") from error
            known = key, table.select([*NAMES, "row_group", "row", "num_rows", "mean_abs_advantage"])
            self._files[rollout] = known
        return known[1]

    def whole(self, names: Sequence[str] = NAMES) -> pa.Table:
        """Columns of the index of all rollouts, in their order."""
        return joined_tables([_read(file, names) for file in self._present().values()], names)

    def groups(self, within_s: float = math.inf) -> tuple[Mapping[str, Any], int, int, list[int]]:
        """Columns of the run's groups in the order of the rollouts; how many rollouts were read, and how many there are; and those whose
        file cannot be read.

        Only files that came since the last call are read, the newest first, and after `within_s` seconds no more of them.
        """
        end = time.monotonic() + within_s
        with self._lock:
            files = self._present()
            if any(files.get(rollout) != file for rollout, file in self._grouped.items()):
                self._grouped, self._broken, self._groups = {}, [], groups_of_index(INDEX_SCHEMA.empty_table())
            new = [rollout for rollout in reversed(files) if rollout not in self._grouped]
            for start in range(0, len(new), BLOCK):
                block = new[start : start + BLOCK]
                read = {rollout: self._try(files[rollout]) for rollout in sorted(block)}
                self._broken += [rollout for rollout, table in read.items() if table is None]
                found = groups_of_index(joined_tables([table for table in read.values() if table is not None], GROUPED))
                self._groups = joined_groups(found, self._groups)
                self._grouped |= {rollout: files[rollout] for rollout in block}
                if time.monotonic() > end:
                    break
            return self._groups, len(self._grouped), len(files), sorted(self._broken)

    def _present(self) -> dict[int, IndexFile]:
        """The index file of each rollout, or its record file where it has none."""
        folder = self._run.records()
        found: dict[int, IndexFile] = {}
        for place, indexed in ((folder, False), (folder and inside(self._run.root, folder / INDEX, folders=True), True)):
            with os.scandir(place) if place is not None else nullcontext(()) as entries:
                for entry in entries:
                    rollout = rollout_of(Path(entry.name)) if entry.name.endswith(SUFFIX) else None
                    if rollout is None or (entry.is_symlink() and inside(self._run.root, Path(entry.path)) is None) or not entry.is_file():
                        continue
                    status = entry.stat()
                    found[rollout] = IndexFile(Path(entry.path), indexed, status.st_mtime_ns, status.st_size)
        return dict(sorted(found.items()))

    def _try(self, file: IndexFile) -> pa.Table | None:
        try:
            return _read(file, GROUPED)
        except UNREADABLE:
            return None


def _read(file: IndexFile, names: Sequence[str]) -> pa.Table:
    return read_index_file(file.path, names) if file.indexed else index_of_file(file.path).select(names)


def joined_tables(tables: Sequence[pa.Table], names: Sequence[str]) -> pa.Table:
    """Tables with these columns as one, with a single piece for each column."""
    return (pa.concat_tables(tables) if tables else INDEX_SCHEMA.empty_table().select(names)).combine_chunks()


def found_records(run: ViewedRun, rollout: int) -> Path | None:
    """The record file of a rollout; None where it is not there (any more)."""
    folder = run.records()
    return None if folder is None else inside(run.root, folder / file_name(rollout))


def record_path(run: ViewedRun, rollout: int) -> Path:
    """The record file of a rollout.

    Raises:
        ValueError: it is not there (any more).
    """
    path = found_records(run, rollout)
    if path is None:
        raise ValueError(f"the records of rollout {rollout} are not there any more (observe.records.keep, or removed by hand)")
    return path


def groups_of_index(table: pa.Table) -> dict[str, Any]:
    """One entry for each group of an index: arrays of its rollout, place, size, scores, lengths, errors, and the change of its mean since
    the same row of data was last played."""
    count = len(table)
    rollout = np.asarray(table["rollout_id"], np.int64) if count else np.zeros(0, np.int64)
    group = np.asarray(table["group"], np.int64) if count else np.zeros(0, np.int64)
    new = np.ones(count, bool)
    new[1:] = (rollout[1:] != rollout[:-1]) | (group[1:] != group[:-1])
    starts = np.flatnonzero(new)
    of = np.cumsum(new) - 1
    baseline = np.asarray(table["baseline"].fill_null(False) if count else [], bool)
    reward = np.array(table["reward"].to_numpy() if count else [], np.float64)
    counted = ~np.isnan(reward) & ~baseline
    size = np.bincount(of[counted], minlength=len(starts))
    mean = np.bincount(of[counted], reward[counted], len(starts)) / np.maximum(size, 1)
    squares = np.bincount(of[counted], (reward[counted] - mean[of[counted]]) ** 2, len(starts))
    tokens = np.asarray(table["num_tokens"].fill_null(0) if count else [], np.int64)
    longest, best = np.zeros(len(starts), np.int64), np.full(len(starts), -np.inf)
    np.maximum.at(longest, of, tokens)
    np.maximum.at(best, of[counted], reward[counted])
    failed = ~np.asarray(pc.is_in(table["outcome"], pa.array(["completed", "truncated"])), bool) if count else np.zeros(0, bool)
    task = table["task_id"].take(starts).combine_chunks() if count else pa.array([], pa.string())
    mean = np.where(size > 0, mean, np.nan)
    return {
        "rollout": rollout[starts],
        "group": group[starts],
        "size": size,
        "played": np.bincount(of, minlength=len(starts)),
        "mean": mean,
        "std": np.sqrt(squares / np.maximum(size - 1, 1)),
        "best": np.where(np.isfinite(best), best, np.nan),
        "longest": longest,
        "failed": np.bincount(of, failed, len(starts)).astype(np.int64),
        "dropped": np.asarray(pc.is_valid(table["dropped"].take(starts)), bool) if count else np.zeros(0, bool),
        "task": task,
        "change": _change(task, mean),
    }


def joined_groups(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of two parts of an index, in the order of the rollouts."""
    order = np.argsort(np.concatenate([one["rollout"], other["rollout"]]), kind="stable")
    out = {name: np.concatenate([one[name], other[name]])[order] for name in one if name != "task"}
    task = pa.concat_arrays([one["task"], other["task"]]).take(pa.array(order))
    return {**out, "task": task, "change": _change(task, out["mean"])}


def _change(task: Any, mean: Any) -> Any:
    """Mean of each group less that of the group before it with the same row of data; NaN for the first."""
    out = np.full(len(mean), np.nan)
    if not len(mean):
        return out
    rows = pc.replace_substring_regex(task, pattern="#[^#]*$", replacement="")
    code = np.asarray(rows.dictionary_encode().indices.fill_null(-1))
    order = np.argsort(code, kind="stable")
    same = code[order][1:] == code[order][:-1]
    out[order[1:][same]] = (mean[order][1:] - mean[order][:-1])[same]
    return out


def choose_groups(
    groups: Mapping[str, Any], sort: str, filter: str, start: int, count: int, rollout: int | None = None
) -> dict[str, Any]:
    """A page of the groups, as JSON; with `rollout` of those of that one alone.

    Raises:
        ValueError: an unknown order or filter.
    """
    masks = {
        "all": np.ones(len(groups["mean"]), bool),
        "mixed": (groups["size"] >= 2) & (groups["std"] > LEAST_STD),
        "zero_variance": (groups["size"] >= 2) & (groups["std"] <= LEAST_STD),
        "errors": groups["failed"] > 0,
        "dropped": groups["dropped"],
    }
    keys = {
        "rollout": -groups["rollout"].astype(np.float64),
        "best": -groups["mean"],
        "worst": groups["mean"],
        "spread": -groups["std"],
        "longest": -groups["longest"].astype(np.float64),
        "changed": -np.abs(groups["change"]),
    }
    if sort not in keys or filter not in masks:
        raise ValueError(f"groups are sorted by {', '.join(keys)} and filtered by {', '.join(masks)}, not {sort} and {filter}")
    chosen = masks[filter] if rollout is None else masks[filter] & (groups["rollout"] == rollout)
    places = np.flatnonzero(chosen)
    places = places[np.lexsort((keys["rollout"][places], keys[sort][places]))]  # of equal ones the newest first
    shown = places[start : start + count]
    rows = {name: np.asarray(values)[shown].tolist() for name, values in groups.items() if name != "task"}
    rows["task"] = groups["task"].take(pa.array(shown)).to_pylist()
    return {"total": len(places), "rows": rows}


def file_reader(path: Path) -> pq.ParquetFile:
    """A parquet file whose version this whet knows. Close it."""
    from whet.observe.records.schema import SCHEMA, check_version

    try:
        reader = pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise ValueError(f"{path.name} is no whole record file, another program wrote or cut it: {error}") from error
    try:
        check_version(reader.schema_arrow, path)
        for field in reader.schema_arrow:
            if field.name in SCHEMA.names and _kind(field.type) != _kind(SCHEMA.field(field.name).type):
                raise ValueError(f"the column {field.name} of {path.name} is of type {field.type}: another program wrote it")
    except ValueError:
        reader.close()
        raise
    return reader


def _kind(kind: pa.DataType) -> str:
    """A column's type without its precision."""
    if pa.types.is_list(kind):
        return f"list of {_kind(kind.value_type)}"
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return "number" if is_number else "text" if pa.types.is_string(kind) or pa.types.is_large_string(kind) else str(kind.id)
