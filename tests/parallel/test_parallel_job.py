"""`whet train` as a job of several processes: one leads, the others compute with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.e2e.tiny_run import make_files, metrics_of, over, run_config
from tests.parallel.ranks import as_job
from whet.algo.base import Need
from whet.config import dump_toml
from whet.data.template import load_tokenizer
from whet.model.config import ModelConfig
from whet.model.scalar import load_scalar
from whet.runs.job import train
from whet.train.torch_native.backend import TorchBackend
from whet.types import STOPS

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    make_files(folder)
    return folder


def config_of(folder, name, degrees, **changes):
    train = {"optim": {"lr": 1e-3}, "max_tokens_per_device": 64, "parallel": degrees}
    return run_config(folder, name, **over({"num_rollouts": 3, "train": train}, changes))


def ran(config):
    train(config)


PPO = {"algo": {"name": "ppo", "kl_coef": 0.1}}
LORA = {"lora": {"rank": 4}}
APART = {"critic": {"parallel": {"replicate": 2}}, "reference": {"parallel": {"shard": 2}}}


@pytest.mark.parametrize(
    ("degrees", "changes", "beside"),
    [({"shard": 2}, {}, {}), ({"context": 2}, PPO, APART), pytest.param({"shard": 2}, LORA, {}, marks=pytest.mark.slow)],
)
def test_a_job_runs_as_one_process_does(folder, degrees, changes, beside):
    name = f"{next(iter(degrees))}{'-'.join(changes)}"
    lora = {"train": {"optim": {"lr": 1e-3}, "max_tokens_per_device": 64, **changes}} if "lora" in changes else {}
    changes = {} if lora else changes
    train(config_of(folder, f"{name}-alone", None, **changes, **lora))
    if lora:
        lora["train"]["parallel"] = degrees
    as_job(2, ran, config_of(folder, name, degrees, **changes, **lora, **beside))
    alone, job = metrics_of(folder / f"{name}-alone"), metrics_of(folder / name)
    assert len(job) == len(alone) == 3
    for mine, theirs in zip(job, alone, strict=True):
        assert mine.keys() == theirs.keys()
        for shared in ("train/shared", "critic/shared"):  # what is computed once depends on which samples share a row
            mine.pop(shared, None)
            theirs.pop(shared, None)
        assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-5)
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    mine, theirs = (load_file(folder / run / "model" / file) for run in (name, f"{name}-alone"))
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(mine[key], tensor, rtol=0, atol=3e-4)


def test_a_job_may_choose_its_degrees_itself(folder):
    as_job(2, ran, config_of(folder, "auto", "auto", num_rollouts=1))
    log = (folder / "auto" / "log.txt").read_text()
    assert "auto chose replicate 2" in log and "exchanges:" in log
    train(config_of(folder, "auto-alone", "auto", num_rollouts=1))
    assert len(metrics_of(folder / "auto")) == len(metrics_of(folder / "auto-alone")) == 1


@pytest.mark.parametrize("changes", [{}, pytest.param(PPO, marks=pytest.mark.slow)], ids=["grpo", "ppo"])
def test_a_job_goes_on_from_its_checkpoint_bit_for_bit(folder, changes):
    """The second one from what is written while it goes on; and one process goes on from that with the same losses."""
    whole, resumed, elsewhere = (f"{name}{len(changes)}" for name in ("whole", "resumed", "elsewhere"))
    as_job(2, ran, config_of(folder, whole, {"shard": 2}, checkpoint={"interval": 1, "keep": 5}, **changes))
    later = {"interval": 1, "keep": 5, "async_save": True}
    as_job(2, ran, config_of(folder, resumed, {"shard": 2}, checkpoint=later, num_rollouts=2, **changes))
    saved = sorted(path.parent.name for path in (folder / resumed / "checkpoints").glob("rollout_*/manifest.json"))
    assert saved == ["rollout_000001", "rollout_000002"]
    shutil.rmtree(folder / resumed / "model")
    shutil.copytree(folder / resumed, folder / elsewhere)
    as_job(2, ran, config_of(folder, resumed, {"shard": 2}, checkpoint=later, **changes))
    assert metrics_of(folder / resumed) == metrics_of(folder / whole)
    assert (folder / resumed / "model/model.safetensors").read_bytes() == (folder / whole / "model/model.safetensors").read_bytes()
    train(config_of(folder, elsewhere, None, checkpoint=later, **changes))
    for mine, theirs in zip(metrics_of(folder / elsewhere), metrics_of(folder / whole), strict=True):
        for key in {"policy/loss", "optim/grad_norm", "critic/loss", "critic/grad_norm"} & theirs.keys():
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-5), key


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"deterministic": False, "control": {"max_staleness": 1}, "algo": {"correction": {"weights": "token"}}},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["in turns", "overlapping"],
)
def test_a_reward_model_may_be_spread_over_the_processes(folder, changes):
    """It scores as one that is whole in the first process; also where trajectories end while the policy learns."""
    scores = load_scalar(folder / "model", ModelConfig(path="", device="cpu"), trainable=False, new_head="normal", seed=3)
    scores.hf.save_pretrained(folder / "scores")
    load_tokenizer(folder / "model").save_pretrained(folder / "scores")
    reward = {"name": "model", "options": {"path": str(folder / "scores"), "spread": True}}
    name = f"scored{len(changes)}"
    job = config_of(folder, name, {"shard": 2}, reward=reward, **changes)
    sharded = as_job(2, counted_scores, job)
    assert sharded[0] == sharded[1] > 0, "both take part"
    assert len(metrics_of(folder / name)) == 3
    if not changes:
        train(config_of(folder, f"{name}-alone", None, reward=reward))
        for mine, theirs in zip(metrics_of(folder / name), metrics_of(folder / f"{name}-alone"), strict=True):
            assert mine["reward/total"] == pytest.approx(theirs["reward/total"], rel=1e-4)
            assert mine["policy/loss"] == pytest.approx(theirs["policy/loss"], rel=1e-3, abs=2e-5)


def counted_scores(config):
    """How often this process computed scores."""
    calls = []
    annotate = TorchBackend.annotate

    def counting(self, batch, need):
        found = annotate(self, batch, need)
        if need is Need.SCORES and bool(found.scores.any()):
            calls.append(1)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "annotate", counting)
        train(config)
    return sum(calls)


def drawn(config, seeds_apart):
    """What torch's generator gives on this process after a run."""
    with pytest.MonkeyPatch.context() as patch:
        if seeds_apart:  # as a user's code may, that draws on every process
            for module in ("whet.runs.job", "whet.build.session"):
                patch.setattr(f"{module}.prepare_process", lambda *_: torch.manual_seed(100 + dist.get_rank()))
        train(config)
    return float(torch.rand(()))


def test_every_process_goes_on_with_its_own_random_states(folder):
    """A third one, which was not there before, keeps what it has."""
    checkpoint = {"interval": 1}
    first = as_job(2, drawn, config_of(folder, "random", {"shard": 2}, num_rollouts=1, checkpoint=checkpoint), True)
    assert first[0] != first[1]
    assert as_job(2, drawn, config_of(folder, "random", {"shard": 2}, num_rollouts=1, checkpoint=checkpoint), False) == first
    assert as_job(3, drawn, config_of(folder, "random", {"shard": 3}, num_rollouts=1, checkpoint=checkpoint), False)[:2] == first


def refused(config):
    try:
        train(config)
    except STOPS as error:
        return str(error)


def test_a_job_of_another_size_is_refused(folder):
    texts = as_job(2, refused, config_of(folder, "wrong", {"shard": 4}))
    assert all("asks for 4 processes" in text and "this job has 2" in text and "torchrun --nproc-per-node 4" in text for text in texts)


def test_what_ends_the_controller_ends_the_others(folder):
    """The reward's file is read by the controller alone."""
    texts = as_job(2, refused, config_of(folder, "no_reward", {"shard": 2}, reward={"name": "no_such_reward_anywhere"}))
    assert "no_such_reward_anywhere" in texts[0]


@pytest.mark.slow
def test_torchrun_starts_a_job(folder):
    path = folder / "run.toml"
    path.write_text(dump_toml(config_of(folder, "torchrun", {"shard": 2}, num_rollouts=1)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "whet", "train", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert (folder / "torchrun/model/model.safetensors").is_file()
