"""A run with resources: opened and closed in training, evaluation, generation and the check, and a stopped run goes on to the same bits."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.e2e.test_stop import ask_at
from tests.e2e.tiny_run import make_files, metrics_of, run_config, weights_of
from whet.engine.embedded.core import EngineCore
from whet.runs.commands import evaluate, generate, train
from whet.stop import Stopped

WORLD = """
from contextlib import asynccontextmanager
from pathlib import Path
from whet.env.base import SingleTurn
from whet.env.resources import per_group, per_run

LOG = Path(__file__).with_suffix(".log")
def log(line):
    with LOG.open("a") as file:
        file.write(line + "\\n")

@asynccontextmanager
async def server():
    log("open server")
    yield
    log("close server")

@asynccontextmanager
async def sandbox(task, host=per_run(server)):
    log(f"open {task.id}")
    yield
    log(f"close {task.id}")

class Mine(SingleTurn):
    def __init__(self, box=per_group(sandbox)):
        self.box = box
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resources")
    make_files(folder)
    (folder / "world.py").write_text(WORLD)
    return folder


def settings(folder, name, **changes):
    sets = {"same": {"path": str(folder / "train.jsonl"), "limit": 2}}
    env = {"name": f"{folder / 'world.py'}:Mine"}
    return run_config(folder, name, env=env, num_rollouts=2, evaluate={"interval": 2, "sets": sets}, **changes)


def lines_of(folder) -> list[str]:
    """The lines of the log since the last call."""
    log = folder / "world.log"
    lines = log.read_text().splitlines()
    log.unlink()
    return lines


def check_closed(lines):
    assert lines[0] == "open server" and lines[-1] == "close server"
    counts = Counter(lines)
    assert counts["open server"] == 1
    assert all(counts[line.replace("open", "close")] == count for line, count in counts.items() if line.startswith("open"))


def test_every_command_opens_and_closes_them_and_a_stopped_run_goes_on_to_the_same_bits(folder, monkeypatch, stop):
    train(settings(folder, "undisturbed"))
    lines = lines_of(folder)
    check_closed(lines)
    assert {line for line in lines if line.startswith("open same/")} and sum(line.startswith("open train/") for line in lines) == 4

    with monkeypatch.context() as patch:
        ask_at(patch, EngineCore, "step", stop, 12)
        with pytest.raises(Stopped):
            train(settings(folder, "stopped"))
    check_closed(lines_of(folder))
    stop._number = None
    train(settings(folder, "stopped"))
    check_closed(lines_of(folder))
    assert metrics_of(folder / "stopped") == metrics_of(folder / "undisturbed")
    assert weights_of(folder / "stopped") == weights_of(folder / "undisturbed")

    evaluate(settings(folder, "undisturbed"))
    check_closed(lines_of(folder))
    generate(settings(folder, "undisturbed"), folder / "generated", 2)
    check_closed(lines_of(folder))
