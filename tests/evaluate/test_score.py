"""Rewards over replies that exist already."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from whet.config import load_config
from whet.evaluate.config import ScoreConfig, short_overrides
from whet.evaluate.recorded import read_trajectories
from whet.evaluate.score import score_file
from whet.observe.records import RecordWriter
from whet.rollout.samples import samples_of_groups
from whet.types import Failure, Finish, Group, Message, Origin, Outcome, Rewards, Task, ToolCall, Trajectory, Turn

FUNCTIONS = Path(__file__).resolve().parents[1] / "reward" / "reward_samples.py"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(*overrides):
    return load_config(ScoreConfig, None, short_overrides(list(overrides)))


def scored(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def trajectory(name, answer, outcome=Outcome.COMPLETED, restart=False):
    task = Task(f"t/{name}", (Message("user", "6*7?"),), "42", {"level": [1, "a"]}, origin="train.jsonl:3")
    call = Message("assistant", "so", (ToolCall("add", {"a": 1}, "c0"),))
    prompt = (Origin.PROMPT, Origin.PROMPT)
    turns = (
        Turn((1, 2), prompt, (3, 4), (-0.5, -0.25), (7, 7), call, Finish.STOP),
        Turn((1, 2, 5) if restart else (5,), (*prompt, Origin.ENVIRONMENT) if restart else (Origin.ENVIRONMENT,), (6,), (-0.125,), (8,),
             Message("assistant", answer), Finish.LENGTH, reward=0.5, restart=restart),
    )  # fmt: skip
    error = None if outcome.valid else Failure("E", "m", "w")
    return Trajectory(f"t/{name}#0", task, turns, outcome, Rewards(0.0) if outcome.valid else None, error, temperature=0.7)


def record(folder, trajectories):
    groups = [Group(item.task, (item,)) for item in trajectories]
    RecordWriter(folder).write(0, groups, samples_of_groups(groups))
    return str(folder / "rollouts")


def test_rows_are_scored_in_order_with_components_and_reasons(tmp_path):
    rows = [{"response": r"\boxed{42}", "label": "42"}, {"response": "no", "label": 42, "id": "mine"}]
    summary = score_file(write(tmp_path / "in.jsonl", rows), config("reward=math"), tmp_path / "deep" / "out.jsonl")
    first, second = scored(tmp_path / "deep" / "out.jsonl")
    origin = str(tmp_path / "in.jsonl:1")
    parts = {"reward": 1.0, "components": {"math": 1.0}}
    assert first == {"id": "row 1", "origin": origin, **parts, "outcome": "completed", "detail": ""}
    assert (second["id"], second["reward"]) == ("mine", 0.0) and "no answer" in second["detail"]
    table = dict(summary.rows())
    assert (table["replies"], table["scored"], table["reward, mean"], table["math, mean"]) == (2, 2, 0.5, 0.5)


def test_order_is_kept_and_concurrency_bounded(tmp_path):
    rows = [{"response": str(i)} for i in range(30)]
    settings = config(f"reward={FUNCTIONS}:slow_echo", "reward.workers=3", "reward.timeout_s=60", "concurrency=4")
    score_file(write(tmp_path / "in.jsonl", rows), settings, tmp_path / "out.jsonl")
    assert [row["reward"] for row in scored(tmp_path / "out.jsonl")] == [float(i) for i in range(30)]


def test_what_fails_is_told_and_is_no_score(tmp_path):
    rows = [{"response": "hang"}, {"response": "go"}]
    settings = config(f"reward={FUNCTIONS}:hang_if_asked", "reward.timeout_s=1.0")
    summary = score_file(write(tmp_path / "in.jsonl", rows), settings, tmp_path / "out.jsonl")
    late, fine = scored(tmp_path / "out.jsonl")
    assert (late["reward"], late["outcome"]) == (None, "timeout") and "longer than 1 s" in late["detail"]
    assert fine["reward"] > 0
    assert dict(summary.rows())["not scored: timeout"] == 1 and "longer than 1 s" in summary.first_failure
    settings = config("reward=gpqa")
    score_file(write(tmp_path / "in.jsonl", [{"response": "A"}]), settings, tmp_path / "out.jsonl")
    assert scored(tmp_path / "out.jsonl")[0]["outcome"] == "reward_error"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"respons": "x"}, r"in\.jsonl:2: there is no text in the column 'response'.*the columns are respons"),
        ({"response": 3}, r"in\.jsonl:2: .*it holds a number \(3\)"),
        ({"response": "x", "label": [1]}, r"in\.jsonl:2: column 'label' holds a list"),
        ({"response": "x", "metadata": "{"}, r"in\.jsonl:2: column 'metadata'"),
        ({"response": "x", "prompt": [{"role": 1}]}, r"in\.jsonl:2: column 'prompt', message 0"),
    ],
)
def test_a_malformed_row_is_told_and_nothing_is_written(tmp_path, row, message):
    path = write(tmp_path / "in.jsonl", [{"response": "x", "label": "x"}, row])
    with pytest.raises(ValueError, match=message):
        score_file(path, config("reward=exact"), tmp_path / "out.jsonl")
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_trajectories_come_back_whole_from_records(tmp_path):
    played = [trajectory("a", r"\boxed{42}"), trajectory("b", "41", restart=True), trajectory("c", "x", Outcome.ENV_ERROR)]
    found = list(read_trajectories(record(tmp_path, played)))
    for before, after in zip(played, found, strict=True):
        assert after == replace(before, rewards=None, error=None)  # all but what scoring or playing it gave


def test_a_runs_records_are_scored(tmp_path):
    path = record(tmp_path, [trajectory("a", r"\boxed{42}"), trajectory("b", "41", restart=True), trajectory("c", "x", Outcome.ENV_ERROR)])
    score_file(path, config("reward=math"), tmp_path / "out.jsonl")
    right, wrong, failed = scored(tmp_path / "out.jsonl")
    assert (right["reward"], wrong["reward"]) == (1.0, 0.0) and right["id"] == "t/a#0" and right["origin"] == "train.jsonl:3"
    assert (failed["reward"], failed["outcome"]) == (None, "env_error")


def test_records_that_do_not_add_up_are_told(tmp_path):
    import pyarrow.parquet as pq

    path = Path(record(tmp_path, [trajectory("b", "41", restart=True)])) / "rollout_000000.parquet"
    table = pq.read_table(path)
    assert table.num_rows == 2  # a restart begins another sample
    pq.write_table(table.slice(0, 1), path)
    with pytest.raises(ValueError, match=r"rollout_000000\.parquet:1: the turns have 8 tokens, the record has 4"):
        list(read_trajectories(str(path)))


def test_the_command(tmp_path):
    write(tmp_path / "in.jsonl", [{"response": "It is 42.", "label": "42"}, {"response": "x"}])
    command = [sys.executable, "-m", "whet", "score", "in.jsonl", "reward=exact"]
    options = ["reward.options.extract=last_number", "--output", "o.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "reward, mean" in done.stdout and "1" in done.stdout
    assert "the first reply that could not be scored: task 'row 2' (in.jsonl:2) has no label" in done.stdout + done.stderr
    assert scored(tmp_path / "o.jsonl")[0]["reward"] == 1.0
    for rows, words in (([{"response": "x"}], "nothing was scored: none of the replies has a reward"), ([], "in.jsonl has no replies")):
        write(tmp_path / "in.jsonl", rows)
        none = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert none.returncode == 1 and words in none.stdout + none.stderr, none
    failed = subprocess.run([*command[:-1], "reward=exct"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert failed.returncode == 2 and "there is no reward 'exct'" in failed.stderr


def test_a_reward_of_siblings_is_not_for_single_replies(tmp_path):
    rows = write(tmp_path / "rows.jsonl", [{"response": "42", "label": "42"}])
    with pytest.raises(ValueError, match=r"leave reward\.group out"):
        score_file(rows, config("reward=exact", "reward.group.name=my_code:ranks"), tmp_path / "out.jsonl")
