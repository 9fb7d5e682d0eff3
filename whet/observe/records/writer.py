"""Writing of record files, each whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from whet.files import put_in_place
from whet.observe.records.files import INDEX, ROLLOUTS, UNFINISHED, drop_oldest, file_name
from whet.observe.records.index import READ, index_of
from whet.observe.records.numbers import RolloutNumbers
from whet.observe.records.rows import RecordRow, row_columns, rows_of
from whet.observe.records.schema import CONFIG_KEY, SCHEMA, VERSION, VERSION_KEY
from whet.observe.records.tokens import OTHER, TokenColumns, check_columns
from whet.observe.retention import RecordsConfig
from whet.types import Group, Sample

ROW_GROUP_TOKENS = 1 << 16
"""Tokens from which a row group ends. One is in memory when it is written, and when a trajectory of it is shown."""
NOTHING = RolloutNumbers()


class RecordWriter:
    """Writes `rollouts/rollout_000012.parquet` below a run's folder, whole or not at all; what `write` wrote is on the disk.

    Making one makes the folder, so that a failure is reported before anything is played.

    Args:
        folder: the run's folder.
        retention: what is recorded, and for how long.
        config_hash: hash of the run's settings.

    Raises:
        ValueError: if the folder cannot be made.
    """

    def __init__(self, folder: Path, retention: RecordsConfig | None = None, config_hash: str = "") -> None:
        self._retention, self._config_hash = retention or RecordsConfig(), config_hash
        self._folder = Path(folder) / ROLLOUTS
        try:
            if self._retention.every:
                (self._folder / INDEX).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"records cannot be written to {self._folder}: {error.strerror}; choose another folder") from error

    def due(self, rollout_id: int) -> bool:
        """True if this rollout is to be recorded."""
        return self._retention.every > 0 and rollout_id % self._retention.every == 0

    def write(
        self, rollout_id: int, groups: Sequence[Group], samples: Sequence[Sample], numbers: RolloutNumbers = NOTHING
    ) -> Path | None:
        """Record a rollout, replacing an earlier record of the same one; None where it is not to be recorded.

        Raises:
            ValueError: samples, trajectories and numbers do not fit together.
            OSError: it cannot be written; an earlier record is still there.
        """
        if not self.due(rollout_id):
            return None
        check_columns(samples, numbers.columns, SCHEMA.names)
        rows = rows_of(rollout_id, groups, samples)
        starts = [i for i, row in enumerate(rows) if i == 0 or row.trajectory is not rows[i - 1].trajectory]
        limit = self._retention.trajectories
        num_full = len(rows) if limit is None or limit >= len(starts) else starts[limit]
        plain, tokens = row_columns(rollout_id, rows, samples, numbers), TokenColumns(samples, numbers.columns)
        extra = [pa.field(name, pa.list_(OTHER)) for name in numbers.columns if name not in SCHEMA.names]
        schema = pa.schema([*SCHEMA, *extra], {VERSION_KEY: str(VERSION).encode(), CONFIG_KEY: self._config_hash.encode()})
        path = self._folder / file_name(rollout_id)
        counts = _row_groups(rows, starts, samples)

        def row_groups() -> Iterator[pa.Table]:
            for start, end in pairwise([0, *accumulate(counts)]):
                columns = {name: column.slice(start, end - start) for name, column in plain.items()}
                columns |= tokens.of(rows[start:end], [i < num_full for i in range(start, end)])
                yield pa.table([columns[name] for name in schema.names], schema=schema)

        _write(row_groups(), schema, path)
        index = index_of(pa.table({name: plain[name] for name in READ}), path.name, counts)
        _write([index], index.schema, self._folder / INDEX / path.name)
        if self._retention.keep is not None:
            drop_oldest(self._folder, self._retention.keep)
        return path


def _row_groups(rows: Sequence[RecordRow], starts: Sequence[int], samples: Sequence[Sample]) -> list[int]:
    """Numbers of rows in the row groups. A trajectory's rows stay together."""
    counts: list[int] = []
    begin = num_tokens = 0
    for start, end in pairwise([*starts, len(rows)]):
        for row in rows[start:end]:
            num_tokens += sum(len(t.context) + len(t.tokens) for t in row.trajectory.turns) if row.sample is None else len(
                samples[row.sample].tokens
            )
        if num_tokens >= ROW_GROUP_TOKENS:
            counts.append(end - begin)
            begin, num_tokens = end, 0
    return counts if begin == len(rows) else [*counts, len(rows) - begin]


def _write(row_groups: Iterable[pa.Table], schema: pa.Schema, path: Path) -> None:
    """Write a file of these row groups."""
    unfinished = path.with_suffix(UNFINISHED)
    with pq.ParquetWriter(unfinished, schema, **encoding(schema)) as writer:
        for table in row_groups:
            writer.write_table(table, row_group_size=max(1, table.num_rows))
    put_in_place(unfinished, path)


def encoding(schema: pa.Schema) -> dict[str, Any]:
    """Options of the parquet writer. Numbers of tokens are not worth a dictionary; LZ4 costs least of all compressions that shrink them."""
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    return {"compression": "lz4", "use_dictionary": texts, "write_statistics": texts or False}
