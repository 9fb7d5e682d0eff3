"""`whet records`: a list with filters, one trajectory token by token, JSON lines."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.observe.test_records import FAILED, GROUPS, SAMPLE, SOLVED, TASK, numbers
from whet.cli import main
from whet.observe.records import RecordWriter
from whet.observe.retention import RecordsConfig
from whet.types import Group, Outcome, Proof, Rewards


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two rollouts: one with a failed and an empty trajectory, one of a dropped group."""
    folder = tmp_path_factory.mktemp("listed") / "run"
    found = numbers(
        advantages=[[0.0, 0.0, 1.5, 1.5, 0.0, 1.5]],
        first_clip=[[float("nan"), float("nan"), 0, 1, float("nan"), 10]],
        first_ratio=[[float("nan"), float("nan"), 1.0, 1.5, float("nan"), float("nan")]],
    )
    found = replace(found, proofs={5: Proof(True, 0.5, 2.5e-7)})
    records = RecordWriter(folder, config_hash="abc123")
    records.write(0, GROUPS, [SAMPLE], found)
    cut = replace(SOLVED, id="train:3/5", outcome=Outcome.TRUNCATED, rewards=Rewards(2.0))
    records.write(1, [Group(TASK, (cut, replace(FAILED, id="train:3/6")), dropped="zero_std_2.0")], [])
    return folder


@pytest.fixture
def whet(monkeypatch, capsys):
    """Runs the command, and returns its exit status, its output and its errors."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["whet", "records", *map(str, arguments)])
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return call


def listed(out):
    """The trajectories of a printed list."""
    return [word for line in out.splitlines()[3:] for word in line.split() if word.startswith("train:")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ["train:3/0", "train:3/1", "train:4/0", "train:3/5", "train:3/6"]),
        (("--reverse",), ["train:3/6", "train:3/5", "train:4/0", "train:3/1", "train:3/0"]),
        (("--rollout", "1"), ["train:3/5", "train:3/6"]),
        (("--rollout", ":1"), ["train:3/0", "train:3/1", "train:4/0"]),
        (("--task", "train:4"), ["train:4/0"]),
        (("--outcome", "truncated"), ["train:3/5"]),
        (("--dropped",), ["train:3/5", "train:3/6"]),
        (("--kept", "--failed"), ["train:3/1"]),
        (("--sort", "reward", "--limit", "2"), ["train:3/5", "train:3/0"]),
        (("--sort", "tokens", "--reverse", "--limit", "1"), ["train:4/0"]),
    ],
)
def test_trajectories_are_listed_filtered_and_sorted(whet, run, options, expected):
    status, out, _ = whet(run, *options)
    assert (status, listed(out)) == (0, expected)


def test_a_list_has_what_is_known_of_each_trajectory(whet, run):
    _, out, _ = whet(run, "--limit", 4)
    lines = [line.split() for line in out.splitlines()]
    assert lines[0][1:] == ["5", "trajectories,", "the", "first", "4", "of", "them", "(--limit)"]
    assert lines[1] == ["rollout", "trajectory", "outcome", "reward", "turns", "tokens", "mean", "|A|", "dropped", "error"]
    assert lines[3] == ["0", "train:3/0", "completed", "0.75", "2", "3", "1.5"]
    assert lines[4] == ["0", "train:3/1", "env_error", "2", "3", "KeyError"]
    assert lines[6] == ["1", "train:3/5", "truncated", "2", "2", "3", "zero_std_2.0"]


def test_a_trajectory_is_shown_with_its_tokens(whet, run):
    status, out, _ = whet(run, "--trajectory", "train:3/0")
    assert status == 0
    assert "arrival compared, 50% of memory compared, probe within 2.5e-07 nats" in " ".join(out.split())
    for words in ("reward: math", "5 equals 5", "abc123", "two and three 5", "2+3?", "add"):
        assert words in out
    tokens = [line.split() for line in out[out.index("tokens\n") :].splitlines()[1:]]
    assert tokens[0] == ["place", "id", "text", "origin", "logprobs", "advantages", "first_ratio", "first_clip"]
    assert tokens[2:] == [
        ["0", "1", "prompt", "0", "0"],
        ["1", "2", "prompt", "0", "0"],
        ["2", "7", "model", "-0.1", "1.5", "1", "none"],
        ["3", "8", "model", "-2.5", "1.5", "1.5", "high"],
        ["4", "9", "environment", "0", "0"],
        ["5", "5", "model", "-0.25", "1.5", "skipped"],
    ]
    _, out, _ = whet(run, "--trajectory", "train:3/0", "--columns", "versions,loss_mask")
    assert [line.split() for line in out.splitlines()][-1] == ["5", "5", "5", "true"]
    _, out, _ = whet(run, "--trajectory", "train:3/1")
    assert "KeyError in env:step: no 'b'" in out


def test_rows_are_written_as_json_lines(whet, run, tmp_path):
    file = tmp_path / "out.jsonl"
    status, out, _ = whet(run, "--jsonl", file, "--outcome", "completed")
    assert (status, out) == (0, f"{file}: 1 rows of 1 trajectories\n")
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert (row["trajectory"], row["first_clip"]) == ("train:3/0", [None, None, 0, 1, None, 10])
    status, _, err = whet(run, "--jsonl", file)
    assert status == 2 and "is there already; remove it" in err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--sort", "size"), "--sort size: expected one of reward, tokens"),
        (("--rollout", "ten"), "--rollout ten: expected a number, or a range such as 10:20"),
        (("--outcome", "good"), "there are completed, env_error, refused, truncated"),
        (("--trajectory", "train:3/9"), "no trajectory 'train:3/9' is in these records; there is train:3/0, train:3/1"),
        (("--trajectory", "train:3/0", "--columns", "loss"), "there is no per-token column loss; there are origin, loss_mask"),
    ],
)
def test_what_is_wrong_is_told_with_what_there_is(whet, run, options, told):
    status, _, err = whet(run, *options)
    assert status == 2 and told in err


def test_folders_without_records_are_told_where_there_are_some(whet, run, tmp_path):
    assert whet(run / "rollouts", "--limit", 1)[0] == 0
    assert f"these folders below it have some: {run}" in whet(run.parent)[2]
    assert "neither does one with observe.records.every=0" in whet(tmp_path)[2]
    assert "give a run's folder" in whet(tmp_path / "none")[2]
    assert whet(run, "--task", "nobody")[:2] == (1, "no trajectory is like this\n")


def test_what_is_not_kept_is_told(whet, tmp_path):
    records = RecordWriter(tmp_path, RecordsConfig(keep=1, trajectories=1))
    for i in range(2):
        records.write(i, [Group(TASK, (SOLVED, FAILED))], [])
    assert len(listed(whet(tmp_path)[1])) == 4
    status, _, err = whet(tmp_path, "--rollout", 0, "--trajectory", "train:3/0")
    assert status == 2 and "rollout_000000.parquet is not there any more (observe.records.keep" in err
    assert "its tokens were not recorded (observe.records.trajectories)" in whet(tmp_path, "--trajectory", "train:3/1")[1]


def test_it_works_without_torch(run):
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['whet', 'records', *sys.argv[1:]]; from whet.cli import main; main()"
    for options in ([], ["--trajectory", "train:3/0"]):
        done = subprocess.run([sys.executable, "-c", code, str(run), *options], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and "train:3/0" in done.stdout, done.stderr
