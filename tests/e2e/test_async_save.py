"""Checkpoints that are written while the run goes on."""

from __future__ import annotations

import errno
import shutil
import signal
import time

import pytest

import whet.checkpoint.store
from tests.e2e.test_rollout_kill import starts
from tests.e2e.tiny_run import checkpoints_of, make_files, metrics_of, run_config, weights_of
from whet.checkpoint.store import read_checkpoint
from whet.runs.commands import train

pytestmark = pytest.mark.long

LATER = {"interval": 1, "keep": 9, "async_save": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("later")
    make_files(folder)
    train(run_config(folder, "at_once", checkpoint={**LATER, "async_save": False}))
    return folder


def around_manifest(monkeypatch, before):
    """Have `before(number)` called before the number-th manifest is written."""
    inner, calls = whet.checkpoint.store.write_manifest, []

    def write(*args):
        calls.append(args)
        before(len(calls))
        inner(*args)

    monkeypatch.setattr(whet.checkpoint.store, "write_manifest", write)
    return calls


def test_steps_go_on_meanwhile_and_the_checkpoints_are_those_of_then(folder, monkeypatch):
    log = folder / "later/metrics.jsonl"

    def until_the_next_step(number):
        deadline = time.monotonic() + 60
        while number < 4 and len(log.read_text().splitlines()) <= number:
            assert time.monotonic() < deadline, "no step was made while the checkpoint waited"
            time.sleep(0.01)

    saves = around_manifest(monkeypatch, until_the_next_step)
    train(run_config(folder, "later", checkpoint=LATER))
    assert len(saves) == 4 and checkpoints_of(folder / "later") == checkpoints_of(folder / "at_once")
    for name in checkpoints_of(folder / "later"):
        mine, theirs = (read_checkpoint(folder / run / "checkpoints" / name) for run in ("later", "at_once"))
        assert mine.progress == theirs.progress
        for file in ("weights.safetensors", "optimizer.safetensors", "optimizer.json"):
            assert (mine.folder / file).read_bytes() == (theirs.folder / file).read_bytes()
    assert metrics_of(folder / "later") == metrics_of(folder / "at_once")
    assert weights_of(folder / "later") == weights_of(folder / "at_once")


def test_a_writer_that_fails_ends_the_run_with_its_cause_and_the_run_goes_on_from_the_one_before(folder, monkeypatch):
    def full(number):
        if number == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        around_manifest(patch, full)
        with pytest.raises(OSError, match="a checkpoint cannot be written: No space left on device") as raised:
            train(run_config(folder, "full", checkpoint=LATER))
    assert "the newest whole checkpoint is" in str(raised.value) and "rollout_000001" in str(raised.value)
    assert checkpoints_of(folder / "full")[0] == "rollout_000001"
    assert not list((folder / "full/checkpoints").glob(".writing*"))
    train(run_config(folder, "full", checkpoint=LATER))
    assert metrics_of(folder / "full") == metrics_of(folder / "at_once")
    assert weights_of(folder / "full") == weights_of(folder / "at_once")


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written_the_one_before_is_whole_and_no_bit_changes(folder):
    config = run_config(folder, "killed", checkpoint=LATER)
    moments = [(1, "save", 3), (1, "save", 7), (2, "save", 6)]
    kills = starts(*((config, moment) for moment in moments), (config, None))
    assert kills == [-signal.SIGKILL] * len(moments) + [0]
    for number in range(len(moments)):
        for path in (folder / f"killed.{number}/checkpoints").glob("rollout_*"):
            read_checkpoint(path)
    assert metrics_of(folder / "killed") == metrics_of(folder / "at_once")
    assert weights_of(folder / "killed") == weights_of(folder / "at_once")
    shutil.rmtree(folder / "killed")
