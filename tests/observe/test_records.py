import json
import os
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from whet.evaluate.recorded import read_trajectories
from whet.observe import records
from whet.observe.records import SCHEMA, RecordWriter, drop_records, read_records, read_table
from whet.types import (
    UNSAMPLED,
    Failure,
    Finish,
    Group,
    Message,
    Origin,
    Outcome,
    Rewards,
    Sample,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)

P, M, E = Origin.PROMPT, Origin.MODEL, Origin.ENVIRONMENT
TASK = Task("train:3", (Message("system", "Be brief."), Message("user", "2+3?")), label="5", origin="train.jsonl:4")
PLAIN = Task("train:4", "Once", origin="train.jsonl:5")
CALL = Turn(
    context=(1, 2),
    context_origin=(P, P),
    tokens=(7, 8),
    logprobs=(-0.1, -2.5),
    versions=(4, 5),
    message=Message("assistant", "", tool_calls=(ToolCall("add", {"a": 2, "b": 3}, "c1"),)),
    finish=Finish.STOP,
)
ANSWER = Turn(
    context=(9,),
    context_origin=(E,),
    tokens=(5,),
    logprobs=(-0.25,),
    versions=(5,),
    message=Message("assistant", "5"),
    finish=Finish.LENGTH,
    reward=0.5,
)
SOLVED = Trajectory(
    "train:3/0",
    TASK,
    (CALL, ANSWER),
    Outcome.COMPLETED,
    Rewards(0.75, {"math": 1.0, "length": -0.25}, "5 equals 5"),
    temperature=0.7,
    timings={"engine": 0.5, "env": 0.125},
    counts={"tool_calls": 1},
)
FAILED = Trajectory(
    "train:3/1", TASK, (CALL, ANSWER), Outcome.ENV_ERROR, error=Failure("KeyError", "no 'b'", "env:step", "Traceback…")
)
EMPTY = Trajectory("train:4/0", PLAIN, (), Outcome.REFUSED)
GROUPS = [Group(TASK, (SOLVED, FAILED)), Group(PLAIN, (EMPTY,))]
SAMPLE = Sample(
    tokens=(1, 2, 7, 8, 9, 5),
    origin=(P, P, M, M, E, M),
    loss_mask=(False, False, True, True, False, True),
    logprobs=(0.0, 0.0, -0.1, -2.5, 0.0, -0.25),
    versions=(UNSAMPLED, UNSAMPLED, 4, 5, UNSAMPLED, 5),
    group="train:3",
    trajectory="train:3/0",
    reward=0.75,
    temperature=0.7,
)


def test_a_sample_comes_back_as_it_was(tmp_path):
    advantages = [[0.0, 0.0, 1.5, 1.5, 0.0, 1.5]]
    path = RecordWriter(tmp_path).write(12, GROUPS, [SAMPLE], {"advantages": advantages})
    assert path == tmp_path / "rollouts" / "rollout_000012.parquet"
    row = read_records(path)[0]
    assert row == {
        "rollout_id": 12,
        "task_id": "train:3",
        "task_origin": "train.jsonl:4",
        "group": 0,
        "dropped": None,
        "trajectory": "train:3/0",
        "order": 0,
        "baseline": False,
        "outcome": "completed",
        "valid": True,
        "reward": 0.75,
        "reward_components": {"math": 1.0, "length": -0.25},
        "reward_detail": "5 equals 5",
        "label": "5",
        "metadata": None,
        "temperature": 0.7,
        "prompt": [
            {"role": "system", "content": "Be brief.", "tool_calls": None},
            {"role": "user", "content": "2+3?", "tool_calls": None},
        ],
        "turns": [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": row["turns"][0]["tool_calls"],
                "finish": "stop",
                "reward": None,
                "num_context": 2,
                "num_tokens": 2,
                "restart": False,
            },
            {
                "role": "assistant",
                "content": "5",
                "tool_calls": None,
                "finish": "length",
                "reward": 0.5,
                "num_context": 1,
                "num_tokens": 1,
                "restart": False,
            },
        ],
        "error": None,
        "timings": {"engine": 0.5, "env": 0.125},
        "counts": {"tool_calls": 1},
        "stop": None,
        "notes": [],
        "tokens": [1, 2, 7, 8, 9, 5],
        "origin": [0, 0, 1, 1, 2, 1],
        "loss_mask": [False, False, True, True, False, True],
        "logprobs": [0.0, 0.0, float(np.float32(-0.1)), -2.5, 0.0, -0.25],
        "versions": [-1, -1, 4, 5, -1, 5],
        "advantages": [0.0, 0.0, 1.5, 1.5, 0.0, 1.5],
        "train_logprobs": None,
    }
    assert json.loads(row["turns"][0]["tool_calls"])[0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}


def test_a_greedy_trajectory_is_marked_and_every_token_of_it_is_there(tmp_path):
    greedy = replace(SOLVED, id="train:3/greedy", temperature=0.0, rewards=Rewards(0.25))
    path = RecordWriter(tmp_path).write(0, [Group(TASK, (SOLVED, FAILED), greedy), *GROUPS[1:]], [SAMPLE], {"advantages": [[1.0] * 6]})
    rows = read_records(path)
    assert [(row["trajectory"], row["group"], row["baseline"]) for row in rows] == [
        ("train:3/0", 0, False), ("train:3/1", 0, False), ("train:3/greedy", 0, True), ("train:4/0", 1, False)
    ]  # fmt: skip
    found = rows[2]
    assert (found["order"], found["valid"], found["reward"], found["temperature"]) == (None, True, 0.25, 0.0)
    assert found["tokens"] == list(SAMPLE.tokens) and found["versions"] == list(SAMPLE.versions)
    assert not any(found["loss_mask"]) and found["advantages"] is None
    rewarded = replace(greedy, turns=(replace(CALL, token_rewards=(0.5, -1.0)), ANSWER))
    columns = {"token_rewards": [[0.0, 0.0, 0.25, 0.0, 0.0, 0.0]]}
    rows = read_records(RecordWriter(tmp_path).write(0, [Group(TASK, (SOLVED, FAILED), rewarded)], [SAMPLE], columns))
    assert [row["token_rewards"] for row in rows] == [*columns["token_rewards"], None, [0.0, 0.0, 0.5, -1.0, 0.0, 0.0]]
    greedy_too = replace(greedy, id="train:3/0")
    with pytest.raises(ValueError, match="two trajectories with one id"):
        RecordWriter(tmp_path).write(1, [Group(TASK, (SOLVED,), greedy_too)], [SAMPLE])


def test_a_trajectory_without_a_sample_keeps_its_tokens_and_its_error(tmp_path):
    path = RecordWriter(tmp_path).write(0, GROUPS, [SAMPLE])
    _, failed, empty = read_records(path)
    assert (failed["trajectory"], failed["outcome"], failed["order"]) == ("train:3/1", "env_error", None)
    assert not failed["valid"] and failed["reward"] is None and failed["reward_components"] is None
    assert failed["error"] == {
        "kind": "KeyError",
        "message": "no 'b'",
        "where": "env:step",
        "traceback": "Traceback…",
    }
    assert failed["tokens"] == list(SAMPLE.tokens) and failed["origin"] == list(SAMPLE.origin)
    assert failed["versions"] == list(SAMPLE.versions) and not any(failed["loss_mask"])
    assert failed["logprobs"] == [float(np.float32(x)) for x in SAMPLE.logprobs]
    assert failed["advantages"] is None
    assert (empty["group"], empty["outcome"], empty["tokens"], empty["turns"]) == (1, "refused", [], [])
    assert empty["prompt"] == [{"role": None, "content": "Once", "tool_calls": None}]


def test_a_trajectory_of_several_samples_has_a_row_for_each_with_its_own_columns(tmp_path):
    def sample(order, token):
        return Sample((1, token), (P, M), (False, True), (0.0, -1.0), (-1, 2), "train:3", "train:3/0", order)

    columns = {"train_logprobs": [[0.0, -1.25], [0.0, -1.5]], "values": [[0.0, 3.0], [0.0, 4.0]]}
    path = RecordWriter(tmp_path).write(0, GROUPS[:1], [sample(1, 11), sample(0, 10)], columns)
    rows = read_records(path)
    assert [(r["trajectory"], r["order"], r["tokens"]) for r in rows] == [
        ("train:3/0", 0, [1, 10]),
        ("train:3/0", 1, [1, 11]),
        ("train:3/1", None, [1, 2, 7, 8, 9, 5]),
    ]
    assert [r["train_logprobs"] for r in rows] == [[0.0, -1.5], [0.0, -1.25], None]
    assert [r["values"] for r in rows] == [[0.0, 4.0], [0.0, 3.0], None]


def test_the_file_has_the_stated_types(tmp_path):
    path = RecordWriter(tmp_path).write(0, GROUPS, [SAMPLE])
    types = {field.name: str(field.type) for field in pq.read_schema(path)}
    assert list(types) == SCHEMA.names
    assert types["tokens"] == "list<element: int32>" and types["origin"] == "list<element: int8>"
    assert types["logprobs"] == types["advantages"] == types["train_logprobs"] == "list<element: float>"
    assert types["loss_mask"] == "list<element: bool>" and types["versions"] == "list<element: int32>"


def test_a_folder_reads_in_order_whatever_columns_each_file_has(tmp_path):
    writer = RecordWriter(tmp_path)
    writer.write(10, GROUPS, [SAMPLE], {"values": [[0.5] * 6]})
    writer.write(9, GROUPS, [SAMPLE])
    rows = read_records(tmp_path / "rollouts")
    assert [row["rollout_id"] for row in rows] == [9, 9, 9, 10, 10, 10]
    assert rows[0]["values"] is None and rows[3]["values"] == [0.5] * 6
    with pytest.raises(ValueError, match="no records at"):
        read_table(tmp_path)
    with pytest.raises(ValueError, match="no records at"):
        read_table(tmp_path / "rollouts" / "rollout_000011.parquet")


def test_records_have_a_version_and_one_that_is_not_known_is_refused(tmp_path):
    path = RecordWriter(tmp_path).write(1, GROUPS, [SAMPLE])
    assert pq.read_schema(path).metadata[b"whet.records_version"] == b"2"
    table = pq.read_table(path)
    for version in (b"3", b"0", b"two"):
        pq.write_table(table.replace_schema_metadata({b"whet.records_version": version}), path)
        what = rf"rollout_000001.parquet has records of version '{version.decode()}'; this whet reads versions 1 to 2"
        for read in (lambda: read_table(path), lambda: read_table(path.parent), lambda: list(read_trajectories(str(path)))):
            with pytest.raises(ValueError, match=what):
                read()


def test_records_without_a_version_are_of_version_1_and_read_with_newer_ones(tmp_path):
    writer = RecordWriter(tmp_path)
    old, new = writer.write(0, GROUPS, [SAMPLE]), writer.write(1, GROUPS, [SAMPLE])
    pq.write_table(pq.read_table(old).drop_columns(["stop", "notes"]).replace_schema_metadata(), old)
    assert read_records(old) == [{key: value for key, value in row.items() if key not in ("stop", "notes")} | {"rollout_id": 0}
                                 for row in read_records(new)]  # fmt: skip
    assert [row["notes"] for row in read_records(old.parent)] == [None] * 3 + [[]] * 3
    assert [(t.id, t.stop) for t in read_trajectories(str(old.parent))] == 2 * [(t.id, None) for g in GROUPS for t in g.trajectories]


def test_a_rollout_of_nothing_is_an_empty_file(tmp_path):
    assert read_records(RecordWriter(tmp_path).write(0, [], [])) == []


def test_only_every_nth_rollout_is_recorded(tmp_path):
    written = [RecordWriter(tmp_path, every=3).write(i, GROUPS, [SAMPLE]) for i in range(5)]
    assert [path is not None for path in written] == [True, False, False, True, False]
    assert RecordWriter(tmp_path / "never", every=0).write(0, GROUPS, [SAMPLE]) is None
    assert not (tmp_path / "never").exists()
    with pytest.raises(ValueError, match="records_every must be 0"):
        RecordWriter(tmp_path, every=-1)


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path, monkeypatch):
    writer = RecordWriter(tmp_path)
    path = writer.write(0, GROUPS, [SAMPLE])
    before = path.read_bytes()

    def break_off(table, where, **kwargs):
        where.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(records.pq, "write_table", break_off)
    with pytest.raises(OSError, match="disk full"):
        writer.write(0, [], [])
    assert path.read_bytes() == before and len(read_records(tmp_path / "rollouts")) == 3


def test_a_rollout_written_again_replaces_the_first(tmp_path):
    writer = RecordWriter(tmp_path)
    writer.write(0, GROUPS, [SAMPLE])
    writer.write(0, GROUPS[1:], [])
    assert [row["trajectory"] for row in read_records(tmp_path / "rollouts")] == ["train:4/0"]
    assert [file.name for file in (tmp_path / "rollouts").iterdir()] == ["rollout_000000.parquet"]


def test_a_record_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And its name is on the disk when `write` returns, so that no crash leaves a metrics line without its records."""
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append(f"to {new}"), replace(old, new)))
    path = RecordWriter(tmp_path).write(0, GROUPS, [SAMPLE])
    assert calls == [str(path.with_suffix(".tmp")), f"to {path}", str(path.parent)]


def test_records_from_a_rollout_on_are_dropped(tmp_path):
    writer = RecordWriter(tmp_path)
    for i in (0, 7, 8, 1_000_000):
        writer.write(i, GROUPS, [SAMPLE])
    (tmp_path / "rollouts/rollout_000003.tmp").touch()
    (tmp_path / "rollouts/rollout_notes.parquet").touch()
    drop_records(tmp_path, 8)
    left = ["rollout_000000.parquet", "rollout_000007.parquet", "rollout_notes.parquet"]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == left
    drop_records(tmp_path / "none", 0)


def test_text_that_utf8_cannot_hold_is_escaped(tmp_path):
    turn = Turn((1,), (P,), (2,), (-1.0,), (0,), Message("assistant", "a\ud800b é"), Finish.STOP)
    odd = Trajectory("t", TASK, (turn,), Outcome.COMPLETED, Rewards(1.0))
    path = RecordWriter(tmp_path).write(0, [Group(TASK, (odd,))], [])
    assert read_records(path)[0]["turns"][0]["content"] == "a\\ud800b é"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"advantages": []}, "'advantages' is for 0 samples, but there are 1"),
        ({"advantages": [[1.0]]}, r"'advantages' has 1 values for the 6 tokens of samples\[0\] \(.* 'train:3/0'"),
        ({"logprobs": [[1.0] * 6]}, "already has a column 'logprobs'"),
        ({"outcome": [[1.0] * 6]}, "already has a column 'outcome'"),
    ],
)
def test_columns_that_do_not_fit_are_named(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        RecordWriter(tmp_path).write(0, GROUPS, [SAMPLE], columns)
    assert not any((tmp_path / "rollouts").iterdir())


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"records cannot be written to .*file/rollouts: Not a directory; choose another folder"):
        RecordWriter(tmp_path / "file")
    RecordWriter(tmp_path / "none", every=0)
    assert not (tmp_path / "none").exists()


def test_a_sample_must_belong_to_one_trajectory(tmp_path):
    with pytest.raises(ValueError, match=r"samples\[0\] is of trajectory 'train:3/0', which is in none"):
        RecordWriter(tmp_path).write(0, GROUPS[1:], [SAMPLE])
    with pytest.raises(ValueError, match="two trajectories with one id"):
        RecordWriter(tmp_path).write(0, [GROUPS[0], GROUPS[0]], [SAMPLE])
