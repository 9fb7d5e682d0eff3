import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from whet.build.session import open_run
from whet.files import BLOCK_BYTES, AppendedLines, replace_file
from whet.observe.display import Headline, PlainDisplay
from whet.runfolder import journal as journal_module
from whet.runfolder.environment import environment
from whet.runfolder.journal import END, FAILURES, LOG, STARTS, Journal, LoggedDisplay, read_rows
from whet.settings.supervised import SupervisedRunConfig
from whet.types import Failure

ROOT = Path(__file__).resolve().parents[2]
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d"
FAILURE = Failure("ValueError", "bad reply: Tom has", "env.step", "Traceback (most recent call last):\nValueError: bad reply: Tom has\n")


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path)
    yield journal
    journal.close()


def log(folder: Path) -> list[str]:
    """The log's lines without their times, which are checked here."""
    lines = (folder / LOG).read_text().splitlines()
    for line in lines:
        assert re.match(rf"{STAMP} (info   |warning|error  ) |    ", line), line
    return [re.sub(rf"^{STAMP} ", "", line) for line in lines]


def test_a_start_and_its_end(tmp_path, journal):
    began = time.time()
    assert journal.started("whet train a.toml", environment()) == []
    [start] = read_rows(tmp_path / STARTS)
    assert start.keys() == {"time", "pid", "command", "environment", "code"}
    assert began <= start["time"] <= time.time()
    assert (start["pid"], start["command"], start["environment"]) == (os.getpid(), "whet train a.toml", environment())
    assert not (tmp_path / END).exists()
    assert journal.ended("finished") is True
    end = json.loads((tmp_path / END).read_text())
    assert end.keys() == {"status", "time", "resume_command"} and end["status"] == "finished" and end["resume_command"] is None
    assert log(tmp_path) == [f"info    start 1, process {os.getpid()}: whet train a.toml", "info    finished"]


def test_an_end_says_what_failed_and_how_to_go_on(tmp_path, journal):
    journal.started("whet train a.toml", environment())
    try:
        raise KeyError("no such row: Tom has")
    except KeyError as error:
        assert journal.ended("failed", error, "whet train a.toml") is True
    end = json.loads((tmp_path / END).read_text())
    assert (end["status"], end["kind"], end["message"]) == ("failed", "KeyError", "'no such row: Tom has'")
    assert end["resume_command"] == "whet train a.toml" and end["user_code"] is True
    assert end["traceback"].startswith("Traceback") and end["traceback"].endswith("KeyError: 'no such row: Tom has'\n")
    assert end["frames"][-2:] == ['    raise KeyError("no such row: Tom has")', "KeyError"]
    assert log(tmp_path)[-1] == "error   failed with KeyError: see end.json"
    assert "Tom has" not in (tmp_path / LOG).read_text()


def test_a_new_start_takes_the_last_end_away_and_tells_what_changed(tmp_path, journal):
    old = environment()
    old["versions"]["torch"] = "1.0"
    journal.started("whet train a.toml", old)
    journal.ended("stopped", resume_command="whet train a.toml")
    journal.close()
    again = Journal(tmp_path)
    changed = again.started("whet train a.toml", environment())
    again.close()
    assert changed == [f"torch {environment()['versions']['torch']} (was 1.0)"]
    assert not (tmp_path / END).exists(), "killed now, it would look as if it had been stopped"
    assert len(read_rows(tmp_path / STARTS)) == 2
    assert log(tmp_path)[1:] == [
        "info    stopped",
        f"info    start 2, process {os.getpid()}: whet train a.toml",
        f"warning differs from the start before: {changed[0]}",
    ]


def test_the_first_failure_of_each_kind_and_place_counts_across_starts(tmp_path, journal):
    assert journal.failure("train/3#0/1", FAILURE) is True
    assert journal.failure("train/4#0/1", Failure("ValueError", "another", "env.step", "")) is False
    assert journal.failure("train/4#0/1", Failure("ValueError", "another", "reward", "")) is True
    assert journal.failure("train/4#0/1", Failure("KeyError", "another", "env.step", "")) is True
    journal.close()
    again = Journal(tmp_path)
    assert again.failure("train/9#1/0", FAILURE) is False
    assert again.failure("train/9#1/0", Failure("KeyError", "third", "reward", "")) is True
    again.close()
    rows = read_rows(tmp_path / FAILURES)
    assert [(row["kind"], row["where"]) for row in rows] == [
        ("ValueError", "env.step"),
        ("ValueError", "reward"),
        ("KeyError", "env.step"),
        ("KeyError", "reward"),
    ]
    assert rows[0].keys() == {"time", "trajectory", "kind", "where", "message", "traceback", "frames"}
    assert (rows[0]["trajectory"], rows[0]["message"], rows[0]["traceback"]) == ("train/3#0/1", FAILURE.message, FAILURE.traceback)
    assert "Tom has" not in (tmp_path / LOG).read_text()
    assert log(tmp_path)[0] == "warning first ValueError in env.step: see failures.jsonl"


def test_text_of_several_lines_is_indented_and_steers_no_terminal(tmp_path, journal):
    journal.line("one\ntwo\x1b[2J\r\ud800", "error")
    assert log(tmp_path) == ["error   one", "    two\\x1b[2J\\r\\ud800"]


@pytest.mark.parametrize("name", [LOG, STARTS, FAILURES])
@pytest.mark.parametrize("torn", [b'{"kind": "Val', b"x" * (2 * BLOCK_BYTES + 1)])
def test_a_torn_last_line_is_cut(tmp_path, name, torn):
    journal = Journal(tmp_path)
    journal.started("a", {})
    journal.failure("t", FAILURE)
    journal.close()
    whole = (tmp_path / name).read_bytes()
    assert whole.endswith(b"\n")
    (tmp_path / name).write_bytes(whole + torn)
    again = Journal(tmp_path)
    assert (tmp_path / name).read_bytes() == whole
    again.started("b", {})
    again.failure("t", Failure("KeyError", "", "reward"))
    again.close()
    assert [row["command"] for row in read_rows(tmp_path / STARTS)] == ["a", "b"]
    assert [row["kind"] for row in read_rows(tmp_path / FAILURES)] == ["ValueError", "KeyError"]


def test_a_file_without_a_whole_line_is_emptied(tmp_path):
    (tmp_path / LOG).write_bytes(b"x" * (BLOCK_BYTES + 7))
    Journal(tmp_path).close()
    assert (tmp_path / LOG).read_bytes() == b""


def test_lines_are_there_after_a_kill(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom whet.runfolder.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for i in range(10**9):\n    journal.line(f'line {i}')\n    print(i, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) >= 20:
            break
    process.send_signal(signal.SIGKILL)
    said = 20 + len(process.stdout.read().splitlines())
    process.wait(30)
    process.stdout.close()
    Journal(tmp_path).close()
    lines = log(tmp_path)
    assert lines == [f"info    line {i}" for i in range(len(lines))] and len(lines) >= said


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(tmp_path):
    """Behind a limit of the file's size, which like a full disk writes a part of a line first."""
    lines = AppendedLines(tmp_path / "x.txt")
    lines.append("first")
    size = (tmp_path / "x.txt").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            lines.append("second, which is longer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "x.txt").read_text() == "first\n"
    lines.append("third")
    lines.close()
    assert (tmp_path / "x.txt").read_text() == "first\nthird\n"


def test_a_replacement_that_does_not_fit_leaves_the_old_file(tmp_path):
    replace_file(tmp_path / "x.json", "old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            replace_file(tmp_path / "x.json", "new, which is longer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "old"


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("broken", ["disk", "words", "stderr"])
def test_a_note_of_the_end_never_raises(tmp_path, journal, monkeypatch, capsys, broken):
    def full(path, text):
        raise OSError(28, "No space left on device")

    if broken != "words":
        monkeypatch.setattr(journal_module, "replace_file", full)
    if broken == "stderr":
        closed = io.StringIO()
        closed.close()
        monkeypatch.setattr(sys, "stderr", closed)
    error = Unspeakable() if broken == "words" else ValueError("x")
    assert journal.ended("failed", error) is False
    assert not (tmp_path / END).exists()
    if broken != "stderr":
        err = capsys.readouterr().err
        assert err.startswith(f"warning: {tmp_path}: how the run ended cannot be noted:") and err.count("\n") == 1


def test_a_closed_or_full_log_does_not_hide_the_end(tmp_path, journal):
    journal.close()
    assert journal.ended("failed", ValueError("x")) is False, "the log could not say it"
    assert json.loads((tmp_path / END).read_text())["kind"] == "ValueError"


def test_a_full_disk_is_told_while_the_run_goes_on(journal, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        journal.line("x")
    with pytest.raises(OSError, match="No space left"):
        journal.failure("t", FAILURE)
    monkeypatch.undo()
    assert journal.failure("t", FAILURE) is True, "what was not written down is still new"


def test_lines_are_synced(journal, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.append(os.fstat(descriptor).st_size), real(descriptor)))
    journal.line("x")
    assert synced == [(journal.folder / LOG).stat().st_size]


class Shown:
    """A display that keeps what it is told."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *arguments: self.calls.append((name, *arguments))


def test_the_display_is_told_everything_and_the_log_what_the_plain_display_prints(tmp_path, journal):
    headlines = [Headline("reward/mean", "reward", ".2f")]
    shown, out = Shown(), io.StringIO()
    values = {"reward/mean": 0.4123, "time/rollout_s": 0.5, "time/step_s": 0.5}
    rows = [["held-out", 0.8125], ["gsm8k", None]]
    for display in (LoggedDisplay(shown, journal, headlines), PlainDisplay(headlines, out=out, err=out, clock=lambda: 0.0)):
        display.start("whet train: runs/x", 7, {"model": "tiny", "device": "cpu"})
        display.phase("rollout")
        display.step(7, values)
        display.note("saved\nhere")
        display.warn("slow")
        display.table("Accuracy", ["set", "after"], rows)
        display.close()
    assert shown.calls == [
        ("start", "whet train: runs/x", 7, {"model": "tiny", "device": "cpu"}),
        ("phase", "rollout"),
        ("step", 7, values),
        ("note", "saved\nhere"),
        ("warn", "slow"),
        ("table", "Accuracy", ["set", "after"], rows),
        ("close",),
    ]
    logged = [re.sub(r"^(info    |warning |    )|(?<=0\.)\d\d(?= s )", "", line) for line in log(tmp_path)]
    said = [re.sub(r"^warning: |(?<=0\.)\d\d(?= s )", "", line) for line in out.getvalue().splitlines()]
    assert logged == said
    assert said[3] == "step 7/7  reward 0.41  0. s (rollout 100%)  eta 0s"
    assert [line for line in log(tmp_path) if line.startswith("warning")] == ["warning slow"]


def test_a_display_told_alone_keeps_the_log_clean(tmp_path, journal):
    shown = Shown()
    display = LoggedDisplay(shown, journal)
    if journal.failure("t", FAILURE):
        display.display.warn(f"trajectory t failed: {FAILURE.message}")
    assert "Tom has" in shown.calls[0][1] and "Tom has" not in (tmp_path / LOG).read_text()


def test_pythons_warnings_are_in_the_log_while_a_run_works(tmp_path):
    config = SupervisedRunConfig.model_validate(
        {"run_dir": str(tmp_path / "run"), "model": {"path": "model", "device": "cpu"}, "data": {"path": "rows.jsonl"}, "num_steps": 1}
    )
    before = warnings.showwarning
    with open_run(config, "whet sft"):
        warnings.showwarning("slowly does it", UserWarning, __file__, 1)
    assert "warning slowly does it" in (tmp_path / "run/log.txt").read_text() and warnings.showwarning is before
