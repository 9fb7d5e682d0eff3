"""`whet sft`, `dpo` and `rm` as jobs of several processes: they learn what one process learns."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.tiny_pairs import BAD, GOOD, make_pairs, pair_settings, write
from tests.e2e.tiny_run import QUESTIONS, SHAPE, metrics_of
from tests.parallel.ranks import as_job
from whet.runs.job import train
from whet.settings.supervised import RUN_CONFIGS
from whet.train.controller import Job

pytestmark = pytest.mark.long

TRAIN = {"optim": {"lr": 1e-3}, "max_tokens_per_device": 100}
LORA = {"lora": {"rank": 2}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("supervised")
    make_pairs(folder, shape=SHAPE.model_copy(update={"num_kv_heads": 2}))
    talks = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]}
        for question in QUESTIONS
        for reply in (GOOD, BAD)
    ]
    write(folder / "talks.jsonl", talks)
    return folder


def config_of(folder, kind, name, degrees=None, **changes):
    settings = pair_settings(folder, name, train={**TRAIN, **changes.pop("train", {}), "parallel": degrees}, num_steps=4, **changes)
    if kind == "sft":
        del settings["evaluate"], settings["pairs_per_step"]
        settings |= {"data": {"path": str(folder / "talks.jsonl")}, "samples_per_step": 5}
    return RUN_CONFIGS[kind].model_validate(settings)


def in_job(num_ranks, config):
    as_job(num_ranks, partial(train, config))


def exported(path):
    return load_file(next(file for name in ("adapter_model", "model") if (file := path / f"model/{name}.safetensors").exists()))


@pytest.mark.parametrize(
    ("kind", "degrees", "changes"),
    [
        ("sft", {"shard": 2}, {}),
        pytest.param("dpo", {"shard": 2}, {}),
        ("rm", {"tensor": 2}, {}),
        pytest.param("sft", {"tensor": 2}, {}, marks=pytest.mark.slow),
        pytest.param("sft", {"context": 2}, {}, marks=pytest.mark.slow),
        pytest.param("dpo", {"shard": 2}, LORA, marks=pytest.mark.slow),
        pytest.param("dpo", {"context": 2}, {}, marks=pytest.mark.slow),
        pytest.param("rm", {"shard": 2}, {}, marks=pytest.mark.slow),
        pytest.param("rm", {"shard": 2}, LORA, marks=pytest.mark.slow),
    ],
)
def test_a_job_learns_what_one_process_learns(folder, kind, degrees, changes):
    """Every line of metrics.jsonl, held-out pairs included, and the exported weights."""
    name = f"{kind}-{next(iter(degrees))}{'-lora' * bool(changes)}"
    train(config_of(folder, kind, f"{name}-alone", train=changes))
    in_job(2, config_of(folder, kind, name, degrees, train=changes))
    alone, job = metrics_of(folder / f"{name}-alone"), metrics_of(folder / name)
    assert len(job) == len(alone) >= 4
    for mine, theirs in zip(job, alone, strict=True):
        assert mine.keys() == theirs.keys()
        mine.pop("train/shared", None), theirs.pop("train/shared", None)  # depends on which samples share a row
        assert mine == pytest.approx(theirs, rel=1e-4, abs=2e-5)
    mine, theirs = exported(folder / name), exported(folder / f"{name}-alone")
    assert mine.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(mine[key], tensor, rtol=0, atol=3e-5)


@pytest.mark.parametrize("kind", ["dpo", pytest.param("rm", marks=pytest.mark.slow), pytest.param("sft", marks=pytest.mark.slow)])
def test_a_job_that_was_stopped_goes_on_bit_for_bit(folder, kind):
    degrees = {"shard": 2}
    in_job(2, config_of(folder, kind, f"{kind}-whole", degrees))
    in_job(2, config_of(folder, kind, f"{kind}-parts", degrees, checkpoint={"interval": 2}))
    shutil.rmtree(folder / f"{kind}-parts/checkpoints/rollout_000004")
    in_job(2, config_of(folder, kind, f"{kind}-parts", degrees, checkpoint={"interval": 2, "async_save": True}))
    assert metrics_of(folder / f"{kind}-parts") == metrics_of(folder / f"{kind}-whole")
    mine, theirs = exported(folder / f"{kind}-parts"), exported(folder / f"{kind}-whole")
    assert all(torch.equal(mine[key], tensor) for key, tensor in theirs.items())


@pytest.mark.parametrize("kind", ["sft", pytest.param("rm", marks=pytest.mark.slow)])
def test_a_job_may_choose_its_degrees_itself(folder, kind):
    in_job(2, config_of(folder, kind, f"{kind}-auto", "auto"))
    assert "auto chose replicate 2" in (folder / f"{kind}-auto/log.txt").read_text()
    assert len(metrics_of(folder / f"{kind}-auto")) >= 4


def test_settings_of_an_engine_have_no_effect(folder):
    with pytest.raises(ValueError, match=r'layout="async" has no effect \(cluster\) in a run without rollouts'):
        config_of(folder, "sft", "refused", cluster={"backend": "ray", "layout": "async"})


def renewals(config):
    """The models that the reference became a copy of, in the calls that the controller broadcast."""
    calls, broadcast = [], Job.broadcast

    def recorded(self, call):
        calls.append((call.method, call.args))
        return broadcast(self, call)

    Job.broadcast = recorded
    train(config)
    return [[type(arg).__name__ for arg in args] for method, args in calls if method == "copy_weights"]


def test_a_reference_becomes_the_restored_policy_without_a_weight_in_the_call(folder):
    train(config_of(folder, "dpo", "dpo-before", checkpoint={"interval": 4}))
    restored = {"checkpoint": {"restore": {"path": str(folder / "dpo-before")}}}
    train(config_of(folder, "dpo", "dpo-after-alone", **restored))
    assert as_job(2, renewals, config_of(folder, "dpo", "dpo-after", {"shard": 2}, **restored)) == [[["TorchBackend"]], []]
    job, alone = ([row["dpo/loss"] for row in metrics_of(folder / f"dpo-after{name}") if "dpo/loss" in row] for name in ("", "-alone"))
    assert job[0] == pytest.approx(0.693147, abs=1e-5) and job == pytest.approx(alone, rel=1e-4, abs=2e-5)
