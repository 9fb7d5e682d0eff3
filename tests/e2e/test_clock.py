"""The time of day decides nothing: it may jump by hours, forward and back, and only what is written down as a time is another."""

from __future__ import annotations

import ast
import random
import time
from pathlib import Path

import whet
from tests.e2e.tiny_run import make_files, metrics_of, run_config, weights_of
from whet.runs.commands import train

TIMES_OF_DAY = {("time", "time"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}
ONLY_WRITTEN_DOWN = {
    "build/session.py",  # warns that the clock was set back
    "observe/services.py",
    "observe/trackers.py",
    "runfolder/failures.py",
    "runfolder/journal.py",
    "runfolder/lock.py",
    "serve/openai_chat.py",
    "serve/openai_completions.py",
    "serve/openai_responses.py",
    "serve/service.py",
}


def test_a_run_does_not_notice_that_the_clock_jumps(tmp_path, monkeypatch):
    make_files(tmp_path)
    train(run_config(tmp_path, "steady"))
    draw, real = random.Random(0), time.time
    monkeypatch.setattr(time, "time", lambda: real() + draw.choice([-1, 1]) * draw.uniform(0, 20 * 3600))
    train(run_config(tmp_path, "jumps", num_rollouts=2))
    train(run_config(tmp_path, "jumps"))
    assert metrics_of(tmp_path / "jumps") == metrics_of(tmp_path / "steady")
    assert weights_of(tmp_path / "jumps") == weights_of(tmp_path / "steady")


def test_the_time_of_day_is_asked_for_only_where_it_is_written_down():
    root = Path(whet.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in TIMES_OF_DAY:
                found.add(path.relative_to(root).as_posix())
    assert found == ONLY_WRITTEN_DOWN
