import json
import os
import threading
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from whet.evaluate.recorded import read_trajectories
from whet.observe.record_query import RecordQuery
from whet.observe.records import (
    COMPUTED,
    SCHEMA,
    GroupNumbers,
    RecordThread,
    RecordWriter,
    RolloutNumbers,
    background,
    drop_records,
    read_index,
    read_records,
    read_table,
    writer,
)
from whet.observe.records.query import choose, read_chosen
from whet.observe.retention import RecordsConfig
from whet.types import (
    UNSAMPLED,
    Failure,
    Finish,
    Group,
    Message,
    Origin,
    Outcome,
    Proof,
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
    message=Message("assistant", "5", reasoning_content="two and three"),
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
FAILED = Trajectory("train:3/1", TASK, (CALL, ANSWER), Outcome.ENV_ERROR, error=Failure("KeyError", "no 'b'", "env:step", "Traceback…"))
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


def numbers(**columns):
    """Columns of lists by sample."""
    return RolloutNumbers({name: np.array([x for row in rows for x in row], np.float32) for name, rows in columns.items()})


def test_a_sample_comes_back_as_it_was(tmp_path):
    found = replace(numbers(advantages=[[0.0, 0.0, 1.5, 1.5, 0.0, 1.5]]), groups={("train:3", ""): GroupNumbers(1, 0.75, 0.0)})
    path = RecordWriter(tmp_path).write(12, GROUPS, [SAMPLE], found)
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
        "role": None,
        "baseline": False,
        "outcome": "completed",
        "valid": True,
        "reward": 0.75,
        "reward_components": {"math": 1.0, "length": -0.25},
        "reward_detail": "5 equals 5",
        "group_size": 1,
        "group_mean": 0.75,
        "group_std": 0.0,
        "mean_abs_advantage": 1.5,
        "label": "5",
        "metadata": None,
        "temperature": 0.7,
        "proofs": {},
        "value_after": None,
        "prompt": [
            {"role": "system", "content": "Be brief.", "reasoning_content": None, "tool_calls": None},
            {"role": "user", "content": "2+3?", "reasoning_content": None, "tool_calls": None},
        ],
        "turns": [
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": None,
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
                "reasoning_content": "two and three",
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
        **dict.fromkeys(list(COMPUTED)[1:]),
    }
    assert json.loads(row["turns"][0]["tool_calls"])[0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}


def test_a_greedy_trajectory_is_marked_and_every_token_of_it_is_there(tmp_path):
    greedy = replace(SOLVED, id="train:3/greedy", temperature=0.0, rewards=Rewards(0.25))
    path = RecordWriter(tmp_path).write(0, [Group(TASK, (SOLVED, FAILED), greedy), *GROUPS[1:]], [SAMPLE], numbers(advantages=[[1.0] * 6]))
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
    rows = read_records(RecordWriter(tmp_path).write(0, [Group(TASK, (SOLVED, FAILED), rewarded)], [SAMPLE], numbers(**columns)))
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
    assert empty["prompt"] == [{"role": None, "content": "Once", "reasoning_content": None, "tool_calls": None}]


def test_a_trajectory_of_several_samples_has_a_row_for_each_with_its_own_columns(tmp_path):
    def sample(order, token):
        return Sample((1, token), (P, M), (False, True), (0.0, -1.0), (-1, 2), "train:3", "train:3/0", order)

    columns = {"train_logprobs": [[0.0, -1.25], [0.0, -1.5]], "values": [[0.0, 3.0], [0.0, 4.0]]}
    path = RecordWriter(tmp_path).write(0, GROUPS[:1], [sample(1, 11), sample(0, 10)], numbers(**columns))
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
    records = RecordWriter(tmp_path)
    records.write(1_000_000, GROUPS, [SAMPLE], numbers(mine=[[0.5] * 6]))
    records.write(999_999, GROUPS, [SAMPLE])
    rows = read_records(tmp_path / "rollouts")
    assert [row["rollout_id"] for row in rows] == [999_999] * 3 + [1_000_000] * 3
    assert rows[0]["mine"] is None and rows[3]["mine"] == [0.5] * 6
    with pytest.raises(ValueError, match="no records at"):
        read_table(tmp_path)
    with pytest.raises(ValueError, match="no records at"):
        read_table(tmp_path / "rollouts" / "rollout_000011.parquet")


def test_records_have_a_version_and_one_that_is_not_known_is_refused(tmp_path):
    path = RecordWriter(tmp_path).write(1, GROUPS, [SAMPLE])
    assert pq.read_schema(path).metadata[b"whet.records_version"] == b"4"
    table = pq.read_table(path)
    for version in (b"5", b"0", b"two"):
        pq.write_table(table.replace_schema_metadata({b"whet.records_version": version}), path)
        what = rf"rollout_000001.parquet has records of version '{version.decode()}'; this whet reads versions 1 to 4"
        for read in (lambda: read_table(path), lambda: read_table(path.parent), lambda: list(read_trajectories(str(path)))):
            with pytest.raises(ValueError, match=what):
                read()


def test_records_without_a_version_are_of_version_1_and_read_with_newer_ones(tmp_path):
    records = RecordWriter(tmp_path)
    old, new = records.write(0, GROUPS, [SAMPLE]), records.write(1, GROUPS, [SAMPLE])
    first = {"tokens", "turns", "group", "rollout_id", "task_id", "task_origin", "trajectory", "order", "outcome", "reward"}
    first |= {"label", "prompt", "origin", "logprobs", "versions", "temperature", "metadata", "error", "dropped", "baseline"}
    pq.write_table(pq.read_table(old).select(first).replace_schema_metadata(), old)
    assert read_records(old) == [{key: value for key, value in row.items() if key in first} | {"rollout_id": 0}
                                 for row in read_records(new)]  # fmt: skip
    index = read_index(old.parent).to_pylist()
    assert [{**row, "rollout_id": 1, "file": new.name} for row in index[:3]] == index[3:]
    assert [row["notes"] for row in read_records(old.parent)] == [None] * 3 + [[]] * 3
    assert [(t.id, t.stop) for t in read_trajectories(str(old.parent))] == 2 * [(t.id, None) for g in GROUPS for t in g.trajectories]


def test_each_row_has_the_proof_of_the_versions_that_sampled_it(tmp_path):
    proofs = {5: Proof(True, 0.75, 1e-7), 6: Proof(True, 1.0, 2e-7), 99: Proof()}
    mixed = replace(SAMPLE, versions=(UNSAMPLED, UNSAMPLED, 5, 6, UNSAMPLED, 7))
    path = RecordWriter(tmp_path).write(0, GROUPS, [mixed], RolloutNumbers(proofs=proofs))
    (first, failed, empty) = (row["proofs"] for row in read_records(path))
    compared = {"arrival": True, "memory_share": 0.75, "probe_nats": 1e-7}
    assert first == {5: compared, 6: {"arrival": True, "memory_share": 1.0, "probe_nats": 2e-7}}, "nobody knows that of version 7"
    assert failed == {5: compared} and empty == {}, "a trajectory without a sample has the versions of its turns"
    old = pq.read_table(path).drop_columns(["proofs"])
    older = path.with_name("rollout_000001.parquet")
    pq.write_table(old.replace_schema_metadata({b"whet.records_version": b"3"}), older)
    assert [row["proofs"] for row in read_records(tmp_path / "rollouts")] == [first, failed, empty, None, None, None]


def test_samples_of_a_game_have_their_role_and_its_reward(tmp_path):
    ((first, *_), *_) = (group.trajectories for group in GROUPS)
    played = replace(first, rewards=Rewards(0.0, by_role={"asker": 0.25, "guesser": 1.0}))
    samples = [replace(SAMPLE, order=i, role=role) for i, role in enumerate(("asker", "guesser", "guesser"))]
    groups = [replace(GROUPS[0], trajectories=(played, *GROUPS[0].trajectories[1:])), *GROUPS[1:]]
    path = RecordWriter(tmp_path).write(0, groups, samples)
    rows = [row for row in read_records(path) if row["trajectory"] == played.id]
    assert [(row["role"], row["reward"]) for row in rows] == [("asker", 0.25), ("guesser", 1.0), ("guesser", 1.0)]
    index = read_index(path.parent)
    assert [(row["roles"], row["role_rewards"]) for row in index.to_pylist()] == [
        (["asker", "guesser"], [0.25, 1.0]),
        (None, None),
        (None, None),
    ]
    chosen = choose(path.parent, RecordQuery(role="guesser"))
    assert [(row["trajectory"], row["reward"]) for row in chosen.to_pylist()] == [(played.id, 1.0)]
    (table,) = read_chosen(path.parent, chosen, "guesser")
    assert table.column("order").to_pylist() == [1, 2]
    with pytest.raises(ValueError, match="--role judge: no trajectory has it; there are asker, guesser"):
        choose(path.parent, RecordQuery(role="judge"))
    kept = path.parent / "index" / path.name
    pq.write_table(pq.read_table(kept).drop_columns(["roles", "role_rewards"]), kept)
    older = read_index(path.parent)
    assert older.schema.names == index.schema.names and older.column("roles").null_count == len(index)
    with pytest.raises(ValueError, match="--role asker: no trajectory has it; there are none at all"):
        choose(path.parent, RecordQuery(role="asker"))


def test_a_rollout_of_nothing_is_an_empty_file(tmp_path):
    assert read_records(RecordWriter(tmp_path).write(0, [], [])) == []


def test_only_every_nth_rollout_is_recorded(tmp_path):
    written = [RecordWriter(tmp_path, RecordsConfig(every=3)).write(i, GROUPS, [SAMPLE]) for i in range(5)]
    assert [path is not None for path in written] == [True, False, False, True, False]
    assert RecordWriter(tmp_path / "never", RecordsConfig(every=0)).write(0, GROUPS, [SAMPLE]) is None
    assert not (tmp_path / "never").exists()


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path, monkeypatch):
    records = RecordWriter(tmp_path)
    path = records.write(0, GROUPS, [SAMPLE])
    before = path.read_bytes()

    def break_off(row_groups, schema, path):
        path.with_suffix(".tmp").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(writer, "_write", break_off)
    with pytest.raises(OSError, match="disk full"):
        records.write(0, [], [])
    assert path.read_bytes() == before and len(read_records(tmp_path / "rollouts")) == 3


def test_a_rollout_written_again_replaces_the_first(tmp_path):
    records = RecordWriter(tmp_path)
    records.write(0, GROUPS, [SAMPLE])
    records.write(0, GROUPS[1:], [])
    assert [row["trajectory"] for row in read_records(tmp_path / "rollouts")] == ["train:4/0"]
    assert sorted(file.name for file in (tmp_path / "rollouts").iterdir()) == ["index", "rollout_000000.parquet"]


def test_a_record_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And its name is on the disk when `write` returns, so that no crash leaves a metrics line without its records."""
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append(f"to {new}"), replace(old, new)))
    path = RecordWriter(tmp_path).write(0, GROUPS, [SAMPLE])
    index = path.parent / "index" / path.name
    assert calls == [str(path.with_suffix(".tmp")), f"to {path}", str(path.parent),
                     str(index.with_suffix(".tmp")), f"to {index}", str(index.parent)]  # fmt: skip


def test_records_from_a_rollout_on_are_dropped(tmp_path):
    records = RecordWriter(tmp_path)
    for i in (0, 7, 8, 1_000_000):
        records.write(i, GROUPS, [SAMPLE])
    (tmp_path / "rollouts/rollout_000003.tmp").touch()
    (tmp_path / "rollouts/rollout_notes.parquet").touch()
    drop_records(tmp_path, 8)
    left = ["rollout_000000.parquet", "rollout_000007.parquet", "rollout_notes.parquet"]
    assert sorted(path.name for path in (tmp_path / "rollouts").glob("*.*")) == left
    assert sorted(path.name for path in (tmp_path / "rollouts/index").iterdir()) == left[:2]
    drop_records(tmp_path / "none", 0)


def test_text_that_utf8_cannot_hold_is_escaped(tmp_path):
    turn = Turn((1,), (P,), (2,), (-1.0,), (0,), Message("assistant", "a\ud800b é"), Finish.STOP)
    odd = Trajectory("t", TASK, (turn,), Outcome.COMPLETED, Rewards(1.0))
    path = RecordWriter(tmp_path).write(0, [Group(TASK, (odd,))], [])
    assert read_records(path)[0]["turns"][0]["content"] == "a\\ud800b é"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"advantages": []}, r"'advantages' has the shape \(0,\), but the 1 samples have 6 tokens"),
        ({"advantages": [[1.0]]}, r"'advantages' has the shape \(1,\), but the 1 samples have 6 tokens"),
        ({"logprobs": [[1.0] * 6]}, "already has a column 'logprobs'"),
        ({"outcome": [[1.0] * 6]}, "already has a column 'outcome'"),
    ],
)
def test_columns_that_do_not_fit_are_named(tmp_path, columns, message):
    with pytest.raises(ValueError, match=message):
        RecordWriter(tmp_path).write(0, GROUPS, [SAMPLE], numbers(**columns))
    assert not any((tmp_path / "rollouts").glob("*.*"))


def test_a_folder_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"records cannot be written to .*file/rollouts: Not a directory; choose another folder"):
        RecordWriter(tmp_path / "file")
    RecordWriter(tmp_path / "none", RecordsConfig(every=0))
    assert not (tmp_path / "none").exists()


def test_a_sample_must_belong_to_one_trajectory(tmp_path):
    with pytest.raises(ValueError, match=r"samples\[0\] is of trajectory 'train:3/0', which is in none"):
        RecordWriter(tmp_path).write(0, GROUPS[1:], [SAMPLE])
    with pytest.raises(ValueError, match="two trajectories with one id"):
        RecordWriter(tmp_path).write(0, [GROUPS[0], GROUPS[0]], [SAMPLE])


def test_a_number_that_nobody_computed_is_null(tmp_path):
    found = numbers(first_clip=[[np.nan, np.nan, 0, 2, np.nan, 10]], first_entropy=[[np.nan, np.nan, 0.5, 0.25, np.nan, np.nan]])
    row = read_records(RecordWriter(tmp_path).write(0, GROUPS, [SAMPLE], found))[0]
    assert row["first_clip"] == [None, None, 0, 2, None, 10]
    assert row["first_entropy"] == [None, None, 0.5, 0.25, None, None]


def test_as_many_trajectories_as_asked_for_have_their_tokens(tmp_path):
    records = RecordWriter(tmp_path, RecordsConfig(trajectories=1))
    rows = read_records(records.write(0, GROUPS, [SAMPLE], numbers(advantages=[[1.0] * 6])))
    assert [row["tokens"] is not None for row in rows] == [row["advantages"] is not None for row in rows] == [True, False, False]
    assert [len(row["turns"]) for row in rows] == [2, 2, 0]
    found = list(read_trajectories(str(tmp_path / "rollouts")))
    assert [(len(t.turns), t.num_tokens_sampled) for t in found] == [(2, 3), (2, 0), (0, 0)]
    assert found[1].response == "5" and found[1].turns[-1].message.reasoning_content == "two and three"


def test_the_newest_files_are_kept_and_the_index_of_all(tmp_path):
    records = RecordWriter(tmp_path, RecordsConfig(keep=2))
    for i in range(4):
        records.write(i, GROUPS, [SAMPLE])
    assert sorted(p.name for p in (tmp_path / "rollouts").glob("*.parquet")) == ["rollout_000002.parquet", "rollout_000003.parquet"]
    assert sorted(set(read_index(tmp_path / "rollouts").column("rollout_id").to_pylist())) == [0, 1, 2, 3]


def test_the_index_says_what_each_trajectory_was_and_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "ROW_GROUP_TOKENS", 1)
    path = RecordWriter(tmp_path).write(3, GROUPS, [SAMPLE], numbers(advantages=[[0.0, 0.0, 1.5, -1.5, 0.0, 3.0]]))
    rows = read_index(path.parent).to_pylist()
    assert rows[0] == {
        "rollout_id": 3, "group": 0, "task_id": "train:3", "trajectory": "train:3/0", "reward": 0.75, "outcome": "completed",
        "num_tokens": 3, "num_turns": 2, "dropped": None, "baseline": False, "mean_abs_advantage": 2.0, "error": None,
        "file": "rollout_000003.parquet", "row_group": 0, "row": 0, "num_rows": 1, "roles": None, "role_rewards": None,
    }  # fmt: skip
    assert [(row["trajectory"], row["error"], row["row_group"], row["row"]) for row in rows[1:]] == [
        ("train:3/1", "KeyError", 1, 1), ("train:4/0", None, 2, 2)
    ]  # fmt: skip
    with pq.ParquetFile(path) as reader:
        assert [reader.read_row_group(row["row_group"]).column("trajectory").to_pylist() for row in rows] == [
            [row["trajectory"]] for row in rows
        ]
    (path.parent / "index" / path.name).unlink()
    assert read_index(path.parent).to_pylist() == rows, "from the records themselves"


def test_records_written_beside_the_run_are_there_when_it_closes(tmp_path):
    thread = RecordThread(RecordWriter(tmp_path))
    for i in range(5):
        thread.write(i, GROUPS, [SAMPLE])
    thread.flush()
    assert len(read_records(tmp_path / "rollouts")) == 15
    thread.write(5, GROUPS, [SAMPLE])
    thread.close()
    assert len(read_records(tmp_path / "rollouts")) == 18
    thread.close()


class Slow:
    """A writer that waits to be told, and may fail."""

    def __init__(self, error=None):
        self.go, self.error, self.written = threading.Semaphore(0), error, []

    def due(self, rollout_id):
        return True

    def write(self, rollout_id, groups, samples, numbers):
        assert self.go.acquire(timeout=60)
        if self.error is not None:
            raise self.error
        self.written.append(rollout_id)


def test_the_run_waits_where_the_thread_is_too_far_behind():
    slow = Slow()
    thread = RecordThread(slow)
    waiting = threading.Thread(target=lambda: [thread.write(i, (), ()) for i in range(4)], daemon=True)
    waiting.start()
    while thread._queue.qsize() < background.QUEUED or not slow.go._cond._waiters:
        pass
    assert waiting.is_alive() and slow.written == []
    for _ in range(4):
        slow.go.release()
    waiting.join(60)
    thread.close()
    assert slow.written == [0, 1, 2, 3]


@pytest.mark.parametrize("method", ["write", "flush", "close"])
def test_an_error_of_the_thread_is_the_next_calls(method):
    slow = Slow(OSError("disk full"))
    thread = RecordThread(slow)
    thread.write(7, (), ())
    slow.go.release()
    thread._queue.join()
    with pytest.raises(OSError, match="disk full") as caught:
        thread.write(8, (), ()) if method == "write" else getattr(thread, method)()
    assert caught.value.__notes__ == ["while the records of rollout 7 were written"]
    thread.close()
