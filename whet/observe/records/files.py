"""Record files of a folder: their names, their order, what is in them, and which of them go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whet.observe.records.schema import check_version

ROLLOUTS = "rollouts"
"""The folder of records below a run's folder."""
INDEX = "index"
"""The folder of the index below that of the records: a file for each record file, with the same name."""
UNFINISHED = ".tmp"
"""Ending of a file that is still being written."""
SUFFIX = ".parquet"


def file_name(rollout_id: int) -> str:
    """Name of a rollout's record file, and of its index file."""
    return f"rollout_{rollout_id:06d}{SUFFIX}"


def rollout_of(path: Path) -> int | None:
    """The rollout that a file's name says. None: it is no record file."""
    number = path.stem.removeprefix("rollout_")
    return int(number) if path.name.startswith("rollout_") and number.isdigit() else None


def record_files(folder: Path) -> list[Path]:
    """The whole record (or index) files of a folder, in the order of the rollouts."""
    found = [(rollout, path) for path in folder.glob(f"*{SUFFIX}") if (rollout := rollout_of(path)) is not None]
    return [path for _, path in sorted(found)]


def drop_records(folder: Path, first: int) -> None:
    """Remove the records in a run's (or an evaluation set's) folder from rollout `first` on, and what a crash left half-written: they are
    of rollouts that a resumed run plays again."""
    for below in (Path(folder) / ROLLOUTS / INDEX, Path(folder) / ROLLOUTS):
        for path in below.glob("rollout_*"):
            rollout = rollout_of(path)
            if path.suffix == UNFINISHED or (path.suffix == SUFFIX and rollout is not None and rollout >= first):
                path.unlink()


def drop_oldest(folder: Path, keep: int) -> None:
    """Remove the oldest record files of a folder, so that `keep` are left. Their index stays."""
    for path in record_files(folder)[:-keep]:
        path.unlink()


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """The records in a file, or in every record file of a folder in the order of the rollouts.

    Columns that only some files have are null in the others.

    Args:
        path: the file or the folder.
        columns: those that are read, as far as a file has them. None: all.

    Raises:
        ValueError: there are no records, or those of a newer version of whet.
    """
    path = Path(path)
    files = record_files(path) if path.is_dir() else [path]
    if not files or not files[0].exists():
        raise ValueError(f"no records at {path}: expected a rollout_*.parquet file or a folder of them")
    tables: list[pa.Table] = []
    for file in files:
        with pq.ParquetFile(file) as reader:
            check_version(reader.schema_arrow, file)
            wanted = None if columns is None else [name for name in columns if name in reader.schema_arrow.names]
            tables.append(reader.read(wanted).replace_schema_metadata())
    return pa.concat_tables(tables, promote_options="permissive")


def read_records(path: Path) -> list[dict[str, Any]]:
    """The rows of `read_table` as dictionaries, maps included."""
    return read_table(path).to_pylist(maps_as_pydicts="strict")
