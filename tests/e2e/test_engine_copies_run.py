"""A run whose engine is two processes: it trains, resumes to the bit, and leaves no process behind."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager

import pytest

from tests.e2e.tiny_run import checkpoints_of, make_files, metrics_of, run_config, weights_of
from whet.observe.records import read_records
from whet.rollout.scheduler import Rollouts
from whet.runs.commands import train

pytestmark = pytest.mark.long

COPIES = {"embedded": {"copies": 2, "cache_tokens": 2048}}


def test_two_copies_train_and_resume_to_the_bit(tmp_path):
    make_files(tmp_path)
    train(run_config(tmp_path, "whole", engine=COPIES))
    train(run_config(tmp_path, "parts", engine=COPIES, num_rollouts=2))
    train(run_config(tmp_path, "parts", engine=COPIES))
    assert checkpoints_of(tmp_path / "parts")
    assert weights_of(tmp_path / "parts") == weights_of(tmp_path / "whole") != weights_of_start(tmp_path)
    one, two = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "parts")
    assert [line for line in one if "policy/loss" in line] == [line for line in two if "policy/loss" in line]
    assert all(line["sync/probe_nats"] < 1e-3 and line["mismatch/logprob_max"] < 1e-3 for line in one)
    assert workers_of_this_process() == []


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "disk", "delta"])
def test_however_weights_travel_a_run_has_the_same_bits(tmp_path, transport):
    make_files(tmp_path)
    train(run_config(tmp_path, "shared", engine=COPIES, num_rollouts=2))
    train(run_config(tmp_path, "other", engine=COPIES, num_rollouts=2, sync={"transport": transport}))
    assert weights_of(tmp_path / "other") == weights_of(tmp_path / "shared") != weights_of_start(tmp_path)
    assert all(line["sync/probe_nats"] < 1e-3 for line in metrics_of(tmp_path / "other"))


@pytest.mark.parametrize(
    ("engine", "sync"),
    [
        ({}, {}),
        ({"embedded": {"own_weights": True}}, {}),
        pytest.param(COPIES, {"transport": "broadcast"}, marks=pytest.mark.slow),
        pytest.param(COPIES, {"transport": "delta"}, marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_sleeps_while_the_trainer_computes_changes_no_bit(tmp_path, engine, sync):
    make_files(tmp_path)
    for name, sleep in (("awake", False), ("sleeps", True)):
        train(run_config(tmp_path, name, engine={**engine, "sleep": sleep}, sync=sync, num_rollouts=3))
    assert weights_of(tmp_path / "sleeps") == weights_of(tmp_path / "awake") != weights_of_start(tmp_path)


def test_an_engine_that_samples_while_the_trainer_computes_cannot_sleep(tmp_path):
    with pytest.raises(ValueError, match=r"engine\.sleep has the engine rest"):
        run_config(tmp_path, "run", deterministic=False, engine={"sleep": True}, control={"max_staleness": 1})


def test_copies_find_stop_texts(tmp_path):
    """They read the tokenizer themselves."""
    make_files(tmp_path)
    seen = []

    def look():
        seen.append(len(workers_of_this_process()))

    config = run_config(tmp_path, "run", engine=COPIES, num_rollouts=1, rollout={"stop": ["a", "e"], "max_turn_tokens": 24})
    with during_rollouts(look):
        train(config)
    assert set(seen) == {2}, "the workers are seen while they work, and so their absence afterwards says something"
    turns = [row["turns"][-1] for row in read_records(tmp_path / "run/rollouts")]
    stopped = [turn["content"] for turn in turns if turn["finish"] == "stop" and ("a" in turn["content"] or "e" in turn["content"])]
    assert stopped and all(("a" in text[-3:] or "e" in text[-3:]) for text in stopped)


@contextmanager
def during_rollouts(look):
    """Call `look` as each rollout begins."""
    inner = Rollouts.take

    async def take(self, *args):
        look()
        return await inner(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollouts, "take", take)
        yield


def workers_of_this_process() -> list[str]:
    """The command lines of its children that are engine workers."""
    listed = subprocess.run(["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False).stdout
    return [line for line in listed.splitlines() if "whet.engine.workers.worker" in line]


def weights_of_start(folder):
    return (folder / "model/model.safetensors").read_bytes()
