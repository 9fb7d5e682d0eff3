"""Folders that another program wrote, cut or emptied: every question is answered, or refused in words, and other files stay readable."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from whet.view.app import Viewer, make_app

RECORDS = "rollouts/rollout_000000.parquet"
INDEX = "rollouts/index/rollout_000000.parquet"
NEVER_NULL = {"rollout_id", "task_id", "group", "trajectory", "baseline", "outcome", "valid", "temperature", "prompt", "turns"}
NEVER_NULL |= {"timings", "counts", "notes"}


def rows_as(change):
    """The records with changed rows."""

    def write(run):
        table = pq.read_table(run / RECORDS)
        rows = table.to_pylist(maps_as_pydicts="strict")
        found = change(rows)
        pq.write_table(table.from_pylist(rows if found is None else found, schema=table.schema), run / RECORDS)

    return write


def not_finite(rows):
    for row in rows:
        row |= {"reward": float("nan"), "group_mean": float("inf"), "value_after": float("-inf"), "temperature": float("nan")}
        row["reward_components"], row["timings"], row["counts"] = {"a": float("inf")}, {"x": float("nan")}, {"x": 2**62}
        row["advantages"][20], row["values"][20], row["tokens"][20] = float("inf"), float("nan"), 2**31 - 1


def all_null(rows):
    for row in rows:
        row |= dict.fromkeys(row.keys() - NEVER_NULL)


def uneven(rows):
    rows[0]["advantages"], rows[0]["origin"] = rows[0]["advantages"][:5], rows[0]["origin"][:3]
    rows[0]["turns"][0]["num_tokens"] = 10**9


def no_rows(run):
    rows_as(lambda rows: [])(run)
    pq.write_table(pq.read_table(run / INDEX).slice(0, 0), run / INDEX)


def fewer_columns(run):
    table = pq.read_table(run / RECORDS)
    left = ["rollout_id", "group", "trajectory", "reward", "outcome", "turns", "task_id", "prompt", "order", "baseline", "dropped", "error"]
    pq.write_table(table.select(left), run / RECORDS)
    shutil.rmtree(run / "rollouts/index")


def first_version(run):
    table = pq.read_table(run / RECORDS)
    later = ("first_", "last_", "old_", "ref_", "td_", "group_", "value_", "notes", "stop", "timings", "error", "reward_", "kl_")
    names = [name for name in table.column_names if not name.startswith(later)]
    pq.write_table(table.select(names).replace_schema_metadata(), run / RECORDS)


def odd_settings(run):
    (run / "config.toml").write_text('algo = 3\nmodel = [1]\nbatch = "x"\nrollout = 7\n')


def odd_lines(run):
    failures = ["3", '{"kind": "\\udcff", "message": "\\ud800"}', '{"kind": {"a": 1}, "traceback": null}', "[]", '{"kind": NaN}']
    (run / "failures.jsonl").write_text("\n".join([*failures, "[" * 100_000]) + "\n")
    (run / "end.json").write_text("[" * 100_000)
    (run / "lesson.json").write_text('{"title": 3, "text": 5}')
    (run / "config.toml").write_bytes(b"\xff\xfe\x00")
    big, name = "1" + "0" * 400, "n" * 3000
    lines = ['{"step": 0, "\\udcff": 1}', f'{{"step": 1, "a": 1e999, "b": true, "big": {big}}}', '{"step": "x"}', "[]", ""]
    lines.append(f'{{"step": Infinity, "{name}": 1}}')
    (run / "metrics.jsonl").write_text("\n".join([*lines, "[" * 100_000]) + "\n")


def newer(run):
    pq.write_table(pq.read_table(run / RECORDS).replace_schema_metadata({"whet.records_version": "99"}), run / RECORDS)


def other_texts(rows):
    for i, row in enumerate(rows):
        row |= {"trajectory": f"<script>\"'&#?/../{i}", "task_id": "\x00\x1b[31m", "outcome": "constructor", "dropped": "__proto__"}


def damaged_pages(run):
    """The records with their end whole and nonsense in what it points to."""
    data = bytearray((run / RECORDS).read_bytes())
    data[4:2000] = bytes(1996)
    data[len(data) // 2 - 500 : len(data) // 2] = bytes(500)
    (run / RECORDS).write_bytes(bytes(data))


def not_utf8(run):
    """The records with bytes in their texts that are no letters."""
    pq.write_table(pq.read_table(run / RECORDS), run / RECORDS, compression="none", use_dictionary=False)
    (run / RECORDS).write_bytes((run / RECORDS).read_bytes().replace("思".encode(), b"\xff\xfe\xfd"))


def other_types(run):
    table = pq.read_table(run / RECORDS)
    place = table.schema.get_field_index("advantages")
    pq.write_table(table.set_column(place, "advantages", pa.array(["x"] * len(table))), run / RECORDS)


def other_places(run):
    table = pq.read_table(run / INDEX)
    before = pa.array([-3] * len(table), table["row"].type)
    pq.write_table(table.set_column(table.schema.get_field_index("row"), "row", before), run / INDEX)


CASES = {
    "not UTF-8": (not_utf8, "not UTF-8"),
    "other types": (other_types, "another program wrote it"),
    "other places": (other_places, "does not fit"),
    "not finite": (rows_as(not_finite), ""),
    "null": (rows_as(all_null), ""),
    "uneven": (rows_as(uneven), ""),
    "other texts": (rows_as(other_texts), "does not fit"),
    "no rows": (no_rows, ""),
    "fewer columns": (fewer_columns, "lack a column"),
    "first version": (first_version, ""),
    "settings of other kinds": (odd_settings, ""),
    "lines of other kinds": (odd_lines, ""),
    "newer": (newer, "newer whet"),
    "cut records": (lambda run: (run / RECORDS).write_bytes((run / RECORDS).read_bytes()[:1000]), "no whole record file"),
    "empty index": (lambda run: (run / INDEX).write_bytes(b""), "no whole file"),
    "damaged pages": (damaged_pages, "is damaged"),
    "no log-probs": (rows_as(lambda rows: [row.update(logprobs=None) for row in rows] and None), ""),
    "records of another kind": (lambda run: (run / RECORDS).write_text(json.dumps({})), "no whole record file"),
    "no tokenizer": (lambda run: (run / "model/tokenizer.json").write_text("{"), ""),
}


@pytest.mark.parametrize("case", CASES)
def test_every_question_is_answered_or_refused_in_words(lessons, tmp_path, case):
    run = tmp_path / "run"
    shutil.copytree(lessons / "poem", run)
    shutil.copy(run / INDEX, run / "rollouts/index/rollout_000007.parquet")
    change, refusal = CASES[case]
    change(run)
    asked = TestClient(make_app(Viewer([run])))
    refused: list[str] = []

    def ask(name, **given):
        answer = asked.get(f"/api/{name}", params={"run": "run", **given})
        if answer.status_code != 200:
            assert answer.status_code == 404
            refused.append(answer.json()["error"])
        return answer

    for name in ("runs", "metrics", "failures", "rollouts", "waits", "groups"):
        assert ask(name).status_code == 200, refused
    table = ask("rollout", rollout=0)
    for name in ("worst", "credit"):
        ask(name, rollout=0)
    ask("search", text="a")
    for one in table.json()["trajectories"] if table.status_code == 200 else ():
        for name in ("trajectory", "same", "export"):
            ask(name, rollout=0, trajectory=one["trajectory"], group=one["group"])
    assert all(refusal in each for each in refused) if refusal else not refused, refused
    assert bool(refused) == bool(refusal)


def test_names_of_folders_need_be_no_letters(lessons, tmp_path):
    odd = [os.fsdecode(os.fsencode(tmp_path) + name) for name in (b"/a\xff", b"/b\nc", b"/<img>")]
    for name in odd:
        Path(name).mkdir()
        (Path(name) / "metrics.jsonl").write_text('{"step": 1}\n')
    asked = TestClient(make_app(Viewer([Path(name) for name in odd])))
    names = [each["name"] for each in asked.get("/api/runs").json()]
    assert names == ["a\\udcff", "b\\nc", "<img>"]
    for name in names:
        assert asked.get("/api/metrics", params={"run": name}).status_code == 200
        assert asked.get("/api/rollouts", params={"run": name}).json() == []


def test_a_run_that_has_started_is_one_and_later_ones_are_found(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/starts.jsonl").write_text('{"pid": 1}\n')
    asked = TestClient(make_app(Viewer([tmp_path])))
    (found,) = asked.get("/api/runs").json()
    assert (found["name"], found["metrics"], found["rollouts"]) == (f"{tmp_path.name}/one", False, None)
    assert asked.get("/api/groups", params={"run": found["name"]}).json()["total"] == 0
    (tmp_path / "two").mkdir()
    (tmp_path / "two/metrics.jsonl").write_text('{"step": 1}\n')
    assert [each["name"].split("/")[1] for each in asked.get("/api/runs").json()] == ["one", "two"]
    shutil.rmtree(tmp_path / "one")
    shutil.rmtree(tmp_path / "two")
    assert [each["rollouts"] for each in asked.get("/api/runs").json()] == [None, None]


def test_a_run_that_only_evaluates_is_listed_by_its_sets(lessons, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/starts.jsonl").write_text('{"pid": 1}\n')
    (tmp_path / "run/config.toml").write_text('[algo]\nname = "ppo"\n')
    shutil.copytree(lessons / "poem/rollouts", tmp_path / "run/evaluations/test/rollouts")
    asked = TestClient(make_app(Viewer([tmp_path / "run"])))
    (found,) = asked.get("/api/runs").json()
    assert (found["name"], found["evaluation"], found["algorithm"]) == ("run/evaluations/test", True, "ppo")
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    assert {each["name"] for each in asked.get("/api/runs").json()} == {"run", "run/evaluations/test"}


def test_many_runs_are_listed(lessons, tmp_path):
    for i in range(100):
        (tmp_path / f"run{i:03}").mkdir()
        (tmp_path / f"run{i:03}/metrics.jsonl").write_text(json.dumps({"step": 1, "reward/total": i}) + "\n")
    found = TestClient(make_app(Viewer([tmp_path]))).get("/api/runs").json()
    assert len({each["name"] for each in found}) == 100


def test_a_file_that_is_being_written_is_not_read(lessons, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(lessons / "poem", run)
    (run / "rollouts/rollout_000001.parquet.tmp").write_bytes(b"PAR1")
    asked = TestClient(make_app(Viewer([run])))
    assert asked.get("/api/rollouts", params={"run": "run"}).json() == [0]
    column = pa.array([1] * 2, pa.int64())
    table = pq.read_table(run / RECORDS)
    table = table.set_column(table.schema.get_field_index("rollout_id"), "rollout_id", column)
    pq.write_table(table, run / "rollouts/rollout_000001.parquet")
    assert asked.get("/api/rollouts", params={"run": "run"}).json() == [0, 1], "records come before their index"
    assert asked.get("/api/groups", params={"run": "run"}).json()["rows"]["rollout"] == [1, 0]
