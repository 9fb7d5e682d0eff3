"""What the page gets is what is recorded: packs, groups, searches, texts of tokens."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.view.packs import read_pack
from whet.observe.records import read_records
from whet.observe.records.index import read_index_file
from whet.view.folders import ViewedRun, find_runs, json_lines
from whet.view.index import RunIndex, choose_groups, groups_of_index
from whet.view.metrics import metrics_pack
from whet.view.pack import json_bytes, pack
from whet.view.pieces import Pieces, byte_letters, pieces_of
from whet.view.scan import groups_of_rollout, same_prompt, search, worst_tokens
from whet.view.trajectories import rollout_pack, trajectory_pack
from whet.view.waits import waits_of


@pytest.fixture
def run(lessons):
    (found,) = find_runs([lessons / "research"])
    return found


def test_a_pack_keeps_every_bit():
    columns = {"a": np.array([1.5, np.nan], np.float32), "b": np.arange(3, dtype=np.int8), "c": np.array([], np.float64)}
    head, found = read_pack(pack({"words": "é\u202e"}, columns))
    assert head["words"] == "é\u202e"
    for name, column in columns.items():
        np.testing.assert_array_equal(found[name], column)


def test_a_trajectory_has_every_recorded_column(run, lessons):
    head, columns = read_pack(trajectory_pack(run, RunIndex(run), pieces_of(run), 0, "lesson/0#0/1", None))
    (row,) = [row for row in read_records(lessons / "research/rollouts") if row["trajectory"] == "lesson/0#0/1"]
    assert (head["samples"][0]["reward"], len(head["turns"]), head["group"]) == (0.25, 3, 0)
    for name, value in row.items():
        if isinstance(value, list) and value and not isinstance(value[0], dict):
            if all(each is None for each in value):
                assert f"0:{name}" not in columns
                continue
            column = columns[f"0:{name}"]
            missing = np.nan if column.dtype.kind == "f" else -1
            np.testing.assert_array_equal(column, np.array([missing if x is None else x for x in value], column.dtype))
    assert [each["trajectory"] for each in head["siblings"]] == ["lesson/0#0/0", "lesson/0#0/1"]
    assert head["siblings"][0]["trained"] == 285
    texts = pieces_of(run)
    assert b"".join(texts.of(token) or b"" for token in row["tokens"]).decode().endswith("Source: a forum.<|end|>")
    bounds = [0, *columns["piece_ends"]]
    spelled = [bytes(columns["piece_bytes"][bounds[i] : bounds[i + 1]]) for i in columns["piece"]]
    assert spelled == [texts.of(token) for token in row["tokens"]]


def test_the_credit_of_a_rollout_is_of_all_its_rows(run, lessons):
    head, columns = read_pack(rollout_pack(run, 0))
    rows = read_records(lessons / "research/rollouts")
    assert head == {"too_long": False, "tokens": sum(len(row["tokens"]) for row in rows), "whole": True, "columns": head["columns"]}
    np.testing.assert_array_equal(columns["values"], np.concatenate([np.array(row["values"], np.float32) for row in rows]))
    np.testing.assert_array_equal(columns["trains"], np.concatenate([[w is not None for w in row["first_weights"]] for row in rows]))


def test_groups_of_a_rollout_and_of_the_run(lessons):
    (run,) = find_runs([lessons / "two-prompts"])
    found = groups_of_rollout(run, RunIndex(run), 0)
    assert [each["reward"] for each in found["trajectories"]] == [1, 1, 0, 0, 1, 0]
    assert found["prompts"] == {"0": "What is 7*8?", "1": "What is 17*23?"} and found["trajectories"][1]["text"] == "7*8 is 56."
    losses = [sum(abs(x) for x in row["first_losses"] if x is not None) for row in read_records(lessons / "two-prompts/rollouts")]
    assert [each["share"] for each in found["trajectories"]] == pytest.approx(losses)
    groups = groups_of_index(RunIndex(run).whole())
    assert list(groups["mean"]) == pytest.approx([2 / 3, 1 / 3]) and list(groups["std"]) == pytest.approx([3**-0.5] * 2)
    assert choose_groups(groups, "worst", "all", 0, 1)["rows"]["group"] == [1]
    assert choose_groups(groups, "rollout", "zero_variance", 0, 9)["total"] == 0


def test_the_change_of_a_group_is_since_the_row_was_last_played(lessons, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(lessons / "two-prompts", run)
    index = run / "rollouts/index"
    table = pq.read_table(index / "rollout_000000.parquet")
    later = table.to_pylist()
    for row in later:
        row |= {"rollout_id": 5, "task_id": row["task_id"].replace("#0", "#1"), "reward": 1.0}
    pq.write_table(table.from_pylist(later, schema=table.schema), index / "rollout_000005.parquet")
    (viewed,) = find_runs([run])
    found = choose_groups(RunIndex(viewed).groups()[0], "changed", "all", 0, 9)["rows"]
    assert found["rollout"][:2] == [5, 5] and found["change"][:2] == pytest.approx([2 / 3, 1 / 3])
    assert choose_groups(RunIndex(viewed).groups()[0], "changed", "all", 0, 9, rollout=0)["rows"]["rollout"] == [0, 0]
    gone = groups_of_rollout(viewed, RunIndex(viewed), 5)
    assert not gone["whole"] and len(gone["trajectories"]) == 6


def test_the_newest_groups_are_there_first_and_files_are_read_once(lessons, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(lessons / "two-prompts", run)
    index = run / "rollouts/index"
    table = pq.read_table(index / "rollout_000000.parquet")

    def add(rollout):
        column = pa.array([rollout] * len(table), pa.int64())
        pq.write_table(table.set_column(0, table.schema.field(0), column), index / f"rollout_{rollout:06d}.parquet")

    for rollout in (1, 2, 3):
        add(rollout)
    monkeypatch.setattr("whet.view.index.BLOCK", 2)
    known = RunIndex(find_runs([run])[0])
    groups, scanned, rollouts, _ = known.groups(within_s=-1)
    assert (groups["rollout"].tolist(), scanned, rollouts) == ([2, 2, 3, 3], 2, 4)
    groups, scanned, *_ = known.groups()
    assert groups["rollout"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and scanned == 4
    assert groups["change"][2:].tolist() == [0] * 6
    read = []
    monkeypatch.setattr("whet.view.index.read_index_file", lambda path, names: read.append(path.name) or read_index_file(path, names))
    add(4)
    assert known.groups()[0]["rollout"].tolist()[-2:] == [4, 4] and read == ["rollout_000004.parquet"]
    (index / "rollout_000001.parquet").unlink()
    assert known.groups()[0]["rollout"].tolist() == [0, 0, 2, 2, 3, 3, 4, 4]
    (index / "rollout_000003.parquet").write_bytes(b"PAR1")
    groups, scanned, rollouts, broken = known.groups()
    assert (groups["rollout"].tolist(), scanned, rollouts, broken) == ([0, 0, 2, 2, 4, 4], 4, 4, [3])


def test_the_same_prompt_is_found_in_other_runs_by_its_text(lessons, tmp_path):
    shutil.copytree(lessons / "two-prompts", tmp_path / "again")
    runs = [(run, RunIndex(run)) for run in find_runs([lessons, tmp_path / "again"])]
    prompt = read_records(lessons / "two-prompts/rollouts")[3]["prompt"]
    answer = same_prompt(runs, "lesson/1#0", prompt)
    found = answer["trajectories"]
    assert answer["broken"] == []
    assert {each["run"] for each in found} == {f"{lessons.name}/two-prompts", "again"} and len(found) == 6


def test_search_finds_words_in_prompts_and_replies(run):
    found = search(run, None, "RUMOUR", None)
    assert [(hit["trajectory"], "rumour" in hit["text"]) for hit in found["hits"]] == [("lesson/0#0/0", True)] and found["before"] is None
    assert [hit["trajectory"] for hit in search(run, None, "Lindau", None)["hits"]] == ["lesson/0#0/0", "lesson/0#0/1"]
    assert search(run, None, "old bridge bus", None)["hits"], "arguments of calls count, too"
    assert search(run, None, "Lindau", 0)["hits"] == []


def test_search_finds_words_in_replies_of_tools(run):
    found = search(run, pieces_of(run), "BUS LINE 2 takes", None)
    assert [(hit["trajectory"], "Bus line 2 takes" in hit["text"]) for hit in found["hits"]] == [("lesson/0#0/0", True)]
    assert search(run, None, "Bus line 2 takes", None)["hits"] == [], "their texts need the tokenizer"
    assert search(run, None, "Lindau", None)["broken"] == []
    once = [hit["trajectory"] for hit in search(run, pieces_of(run), "bridge", None)["hits"]]
    assert once == ["lesson/0#0/0", "lesson/0#0/1"]


def test_a_run_that_cannot_be_read_hides_no_other_one(lessons, tmp_path):
    for name in ("good", "bad"):
        shutil.copytree(lessons / "poem", tmp_path / name)
    (tmp_path / "bad/rollouts/index/rollout_000000.parquet").write_bytes(b"PAR1")
    runs = [(run, RunIndex(run)) for run in find_runs([tmp_path / "good", tmp_path / "bad"])]
    prompt = read_records(lessons / "poem/rollouts")[0]["prompt"]
    found = same_prompt(runs, "lesson/0#0", prompt)
    assert found["broken"] == ["bad"] and {each["run"] for each in found["trajectories"]} == {"good"}


def test_a_file_that_cannot_be_read_stops_no_search(lessons, tmp_path):
    shutil.copytree(lessons / "poem", tmp_path / "run")
    (tmp_path / "run/rollouts/rollout_000003.parquet").write_bytes(b"PAR1")
    (run,) = find_runs([tmp_path / "run"])
    found = search(run, pieces_of(run), "明月", None)
    assert found["broken"] == [3] and len(found["hits"]) == 1


def test_half_a_letter_is_an_escape_in_what_is_sent():
    words = "\udcff é \x1b\n\""
    assert json.loads(json_bytes({"a": words, "b": float("inf")})) == {"a": words, "b": None}
    assert read_pack(pack({"words": words}, {}))[0]["words"] == words


def test_the_worst_differences_are_the_largest(lessons, tmp_path):
    shutil.copytree(lessons / "poem", tmp_path / "run")
    path = tmp_path / "run/rollouts/rollout_000000.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist(maps_as_pydicts="strict")
    rows[1]["train_logprobs"][20] -= 3.0
    pq.write_table(table.from_pylist(rows, schema=table.schema), path)
    (run,) = find_runs([tmp_path / "run"])
    found = worst_tokens(run, pieces_of(run), 0)
    assert [(each["trajectory"], each["place"]) for each in found["worst"]] == [("lesson/0#0/1", 20)]
    assert found["worst"][0]["trained"] - found["worst"][0]["sampled"] == pytest.approx(-3)


def test_seconds_of_trajectories_by_cause(lessons, tmp_path):
    shutil.copytree(lessons / "two-prompts", tmp_path / "run")
    path = tmp_path / "run/rollouts/rollout_000000.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist(maps_as_pydicts="strict")
    for row in rows:
        row["timings"] = {"engine": 3.0, "decode": 1.5, "queue": 0.5, "env": 2.0, "reward": float("inf")}
    rows[0]["timings"] = {"engine": 1.0, "mine": 6.0}
    pq.write_table(table.from_pylist(rows, schema=table.schema), path)
    (run,) = find_runs([tmp_path / "run"])
    (found,) = waits_of(run)
    assert (found["rollout"], found["trajectories"]) == (0, 6)
    share = 5 / 6
    expected = {"engine": (16 - 5 * 2) / 6, "decode": 1.5 * share, "queue": 0.5 * share, "env": 2 * share, "mine": 1.0}
    assert found["seconds"] == pytest.approx(expected)


def test_metrics_come_as_columns_and_then_what_is_new(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 2.5}\n{"step": 2, "b": NaN, "words": "x"}\ntorn')
    run = ViewedRun("r", tmp_path, tmp_path, tmp_path)
    head, columns = read_pack(metrics_pack(run, 0))
    assert head["names"] == ["step", "a", "b"] and head["rows"] == 2
    np.testing.assert_array_equal(columns["1"], [2.5, np.nan])
    with open(file, "a") as more:
        more.write('\n{"step": 3}\n')
    assert read_pack(metrics_pack(run, head["next"]))[1]["0"].tolist() == [3]
    file.write_text('{"step": 9}\n')
    assert read_pack(metrics_pack(run, 10**4))[0]["restarted"]
    assert json_lines(file)[0] == [{"step": 9}]


def test_bytes_of_tokens_need_not_be_letters(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = byte_letters()
    vocabulary = {letters[0xE4] + letters[0xBD]: 0, letters[0xA0]: 1, "hi": 2, letters[0x20] + "x": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|é|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pieces = Pieces(tmp_path / "tokenizer.json")
    assert [pieces.of(i) for i in (0, 1, 2, 3, 4, 99, -1)] == [b"\xe4\xbd", b"\xa0", b"hi", b" x", "<|é|>".encode(), None, None]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"no": "tokenizer"}))
    with pytest.raises(ValueError, match="is no tokenizer"):
        Pieces(tmp_path / "tokenizer.json")
