"""pandas, polars and DuckDB read every column of the records, with the same numbers. The queries are those of docs/records.md."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from tests.observe.test_records import GROUPS, SAMPLE
from whet.observe.records import COMPUTED, SAMPLED, SCHEMA, GroupNumbers, RecordWriter, RolloutNumbers, read_records
from whet.types import Proof

PAGE = (Path(__file__).resolve().parents[2] / "docs/records.md").read_text()
PLACES = [2, 3, 5]
"""Tokens of the sample that train."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three rollouts with a number in every column."""
    folder = tmp_path_factory.mktemp("frames") / "run"
    for rollout in range(3):
        columns = {}
        for i, name in enumerate(COMPUTED):
            column = np.full(6, math.nan)
            column[PLACES] = [1 + i, 2, 3 + rollout] if not name.endswith("_clip") else [0, 1, 10]
            columns[name] = column
        groups, proofs = {("train:3", ""): GroupNumbers(1, 0.75, 0.0)}, {5: Proof(True, 0.5, 2e-7 * (rollout + 1)), 6: Proof()}
        found = RolloutNumbers(columns, np.array([0.5]), groups, proofs)
        RecordWriter(folder).write(rollout, GROUPS, [SAMPLE], found)
    return folder


def example(beginning: str) -> str:
    """The page's code that begins like this."""
    (code,) = re.findall(rf"```(?:python|sql)\n({beginning}.*?)```", PAGE, re.DOTALL)
    return code


@pytest.fixture
def here(run, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/my_run").symlink_to(run)
    monkeypatch.chdir(tmp_path)


def test_pandas_reads_every_column(run, here):
    pandas = pytest.importorskip("pandas")
    expected = read_records(run / "rollouts")
    frame = pandas.concat([pandas.read_parquet(path) for path in sorted((run / "rollouts").glob("*.parquet"))])
    assert list(frame.columns) == SCHEMA.names and len(frame) == len(expected) == 9
    for name in [*SAMPLED, *COMPUTED]:
        for found, row in zip(frame[name], expected, strict=True):
            assert (found is None and row[name] is None) or np.array_equal(
                np.asarray(found, np.float64), np.array([math.nan if x is None else x for x in row[name]], np.float64), equal_nan=True
            )
    assert [dict(pairs) for pairs in frame["proofs"]] == [row["proofs"] for row in expected]
    names: dict = {}
    exec(example("import pandas"), names)
    assert names["entropy"].to_dict() == pytest.approx({i: (12 + 2 + 3 + i) / 3 for i in range(3)})


def test_polars_reads_every_column(run, here):
    polars = pytest.importorskip("polars")
    expected = read_records(run / "rollouts")
    frame = polars.read_parquet(run / "rollouts/*.parquet")
    assert frame.columns == SCHEMA.names and len(frame) == 9
    for name in [*SAMPLED, *COMPUTED]:
        assert frame[name].to_list() == [row[name] for row in expected]
    assert frame["proofs"].to_list() == [row["proofs"] for row in expected]
    names: dict = {}
    exec(example("import polars"), names)
    assert dict(zip(*names["clips"].sort("first_clip"), strict=True)) == {0: 3, 1: 3, 10: 3}


def test_duckdb_reads_every_column(run, here):
    duckdb = pytest.importorskip("duckdb")
    expected = read_records(run / "rollouts")
    with duckdb.connect() as database:
        rows = database.sql("SELECT * FROM 'runs/my_run/rollouts/*.parquet' ORDER BY rollout_id, \"group\", trajectory")
        assert rows.columns == SCHEMA.names
        for found, row in zip(rows.fetchall(), expected, strict=True):
            for name in ("tokens", "first_entropy", "first_clip", "reward", "reward_components", "trajectory", "proofs"):
                assert found[rows.columns.index(name)] == row[name], name
        best, entropy, proven = (database.sql(query).fetchall() for query in example("SELECT").strip().split(";\n") if query.strip())
    assert [row[0] for row in best] == [0, 1, 2] and entropy == [(i, pytest.approx((12 + 2 + 3 + i) / 3)) for i in range(3)]
    assert proven == [(5, 0.5, pytest.approx(6e-7))]
