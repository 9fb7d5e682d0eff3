"""The run's folder: writable, nobody else's, with room."""

import os
import random
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from tests.check.small_run import look, of
from whet.check import disk
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.store import CheckpointStore
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.observe.records import RecordWriter, RolloutNumbers
from whet.observe.records.schema import USE
from whet.plan.memory import checkpoint_bytes
from whet.rollout.samples import samples_of_groups
from whet.runfolder.lock import FolderInUse, claim
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Finish, Group, Message, Origin, Outcome, Progress, Rewards, Task, Trajectory, Turn

AREAS = ("batch", "algorithm", "model", "tokenizer", "environment", "data", "evaluation", "length", "disk")
ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys
from pathlib import Path
from whet.runfolder.lock import claim
held = claim(Path(sys.argv[1]), "whet train x")
print(1, flush=True)
sys.stdin.read()
"""
Usage = namedtuple("Usage", "total used free")


def test_a_folder_that_is_not_there_yet_is_not_made(here):
    findings, _ = look(*AREAS, overrides=["run_dir=a/b/c"])
    assert of(findings, "disk")[0] == "a/b/c can be written" and not (here / "a").exists()
    (here / "run").mkdir()
    assert of(look(*AREAS)[0], "disk")[0] == "run can be written" and list((here / "run").iterdir()) == []


def test_a_folder_below_a_file_fails(here):
    assert "run_dir: train.jsonl/x cannot be written" in of(look(*AREAS, overrides=["run_dir=train.jsonl/x"])[0], "disk", "FAIL")[0]


def test_a_folder_that_another_process_works_in_fails(here):
    (here / "run").mkdir()
    command = [sys.executable, "-c", HOLD, str(here / "run")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert other.stdout.readline() == b"1\n"
        text = of(look(*AREAS)[0], "disk", "FAIL")[0]
        assert f"run is in use by process {other.pid} on " in text and "(whet train x)" in text
        assert of(look(*AREAS, overrides=["run_dir=ru"])[0], "disk", "FAIL") == [], "a name that begins alike is another folder"
    finally:
        other.communicate(timeout=30)
    assert of(look(*AREAS)[0], "disk", "FAIL") == []


def test_to_ask_who_has_a_folder_takes_nothing_away(here):
    (here / "run").mkdir()
    with claim(here / "run", "whet train mine"):
        assert f"run is in use by process {os.getpid()} on " in of(look(*AREAS)[0], "disk", "FAIL")[0]
        with pytest.raises(FolderInUse):
            claim(here / "run", "whet train second")


def test_room_is_needed_for_checkpoints_the_export_and_records(here, monkeypatch):
    _, context = look(*AREAS)
    one = checkpoint_bytes(context.model, context.config.train)
    export = sum(p.nbytes for _, p in context.model.named_weights())
    records = disk.record_bytes(context)

    def found(free, *overrides):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, free))
        return [finding.status for finding in look(*AREAS, overrides=overrides)[0] if finding.area == "disk"]

    assert found(3 * one + export + records) == ["ok", "ok", "ok"]
    assert found(3 * one + export + records - 1) == ["ok", "ok", "warn"]
    assert found(3 * one + export) == ["ok", "ok", "warn"]
    assert found(3 * one + export - 1) == ["ok", "FAIL", "warn"]
    assert found(2 * one + export, "checkpoint.keep=1", "observe.records.every=0") == ["ok", "ok"]
    assert found(2 * one + export - 1, "checkpoint.keep=1", "observe.records.every=0") == ["ok", "FAIL"]


def test_checkpoints_that_are_there_need_no_more_room_and_are_as_large_as_planned(here, monkeypatch):
    model = load_causal(here / "model", ModelConfig(path="x", device="cpu"), trainable=True)
    backend = TorchBackend(model, TrainConfig(), total_steps=1)
    for p in model.hf.parameters():
        p.grad = p.detach().clone()
    backend.optim_step()
    CheckpointStore(here / "run/checkpoints", CheckpointConfig()).save(Progress(1, 1, 1), {}, {}, backend.save)
    _, context = look(*AREAS)
    one = checkpoint_bytes(context.model, context.config.train)
    written = sum(path.stat().st_size for path in (here / "run/checkpoints").rglob("*") if path.is_file())
    assert one == pytest.approx(written, rel=0.1)
    export = sum(p.nbytes for _, p in context.model.named_weights())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 3 * one + export - written))
    assert [f.status for f in look(*AREAS, overrides=["observe.records.every=0"])[0] if f.area == "disk"] == ["ok", "ok"]


def test_greedy_trajectories_are_among_the_records(here):
    sizes = {}
    for name in ("rloo", "remax"):
        _, context = look(*AREAS, overrides=[f"algo.name={name}", "evaluate.sets={}"])
        sizes[name] = disk.record_bytes(context)
    assert sizes["remax"] == 1.5 * sizes["rloo"] > 0, "2 samples of a prompt, and a greedy one"


def test_a_critics_values_and_returns_are_among_the_records(here):
    sizes = {}
    for name in ("rloo", "ppo"):
        _, context = look(*AREAS, overrides=[f"algo.name={name}", "evaluate.sets={}"])
        sizes[name] = disk.record_bytes(context)
        tokens = context.total * context.batch.prompts_per_rollout * context.played_per_prompt * context.rl.rollout.max_tokens
    assert sizes["ppo"] - sizes["rloo"] == 12 * tokens > 0, "three columns of float32"


def test_records_are_at_most_as_large_as_planned_and_not_far_below(here):
    """Written with texts and numbers that do not compress well: every trajectory as long as it may be."""
    long = ["num_rollouts=1", "evaluate.sets.test.limit=1", "batch.prompts_per_rollout=24", "rollout.max_tokens=500"]
    _, context = look(*AREAS, overrides=long)
    rng = random.Random(0)

    def trajectory(i, k):
        tokens = tuple(rng.randrange(480) for _ in range(500))
        words = "".join(chr(rng.randrange(33, 126)) for _ in range(6 * 500))
        numbers = tuple(rng.random() for _ in tokens)
        turn = Turn((1,), (Origin.PROMPT,), tokens, numbers, (3,) * len(tokens), Message("assistant", words), Finish.STOP)
        return Trajectory(f"t{i}/{k}", Task(f"t{i}", "q", "1"), (turn,), Outcome.COMPLETED, Rewards(1.0))

    groups = [Group(Task(f"t{i}", "q", "1"), tuple(trajectory(i, k) for k in range(2))) for i in range(24)]
    samples = samples_of_groups(groups)
    names = ("advantages", "train_logprobs", "old_logprobs", *(f"first_{name}" for name in USE if name != "correction"))
    columns = {name: np.array([rng.randrange(100) + 0.1 * rng.random() for sample in samples for _ in sample.tokens]) for name in names}
    RecordWriter(here / "records").write(0, groups, samples, RolloutNumbers(columns))
    written = sum(path.stat().st_size for path in (here / "records/rollouts").rglob("*.parquet"))
    planned = disk.record_bytes(context)
    assert 0.5 * planned < written < 1.1 * planned
