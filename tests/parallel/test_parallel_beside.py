"""Critic, reference and teacher, each on a layout of its own over the policy's processes, learn and answer as in one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.e2e.tiny_run import QUESTIONS, make_files, run_config
from tests.parallel.ranks import on_ranks
from tests.parallel.test_parallel_more import pairs
from tests.parallel.tiny_models import backend_of, relative, samples
from tests.serve.serve_setup import live
from whet.algo.base import StepPlan
from whet.algo.preference_config import RewardModelConfig
from whet.algo.reward_model import reward_model_loss
from whet.algo.table import build_algorithm
from whet.build.learners import build_learners, check_models
from whet.calls.methods import Target
from whet.core.batch import batch_of
from whet.data.template import load_tokenizer
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.model.scalar import load_scalar
from whet.model.shards import whole
from whet.quickstart.model import SmallModelConfig, make_model
from whet.train.base import Mirror
from whet.train.batching import plan_batch
from whet.train.controller import LOCAL, LOSSES, Controlled, Job
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import ParallelConfig
from whet.train.watchdog import Watchdog
from whet.types import Progress

pytestmark = pytest.mark.long

SHAPE = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48)
LARGER = SmallModelConfig(hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=64)
ON_CPU = ModelConfig(path="tiny", device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy, a larger teacher, another reference, and a reward model that the critic begins with."""
    folder = tmp_path_factory.mktemp("beside")
    make_files(folder, SHAPE)
    make_model(folder / "teacher", QUESTIONS * 2, LARGER, 1)
    make_model(folder / "reference", QUESTIONS * 2, SHAPE, 2)
    load_scalar(folder / "reference", ON_CPU, trainable=False, new_head="normal", seed=3).hf.save_pretrained(folder / "critic")
    load_tokenizer(folder / "model").save_pretrained(folder / "critic")
    return folder


def config_of(folder, degrees, beside):
    models = {name: {"path": str(folder / name), "parallel": beside.get(name)} for name in ("critic", "reference", "teacher")}
    if "urls" in beside:
        models["teacher"] = {"path": str(folder / "teacher"), "urls": beside["urls"]}
    algo = {"name": "ppo", "kl_coef": 0.1, "distill_coef": 0.1, "reference": True}
    train = {"optim": {"lr": 1e-2}, "max_tokens_per_device": 64, "parallel": degrees}
    return run_config(folder, "run", algo=algo, train=train, **models)


def learners_of(config, folder, controller=LOCAL):
    plan = plan_batch(config.batch)
    algorithm = build_algorithm(config.algo, StepPlan(plan.optimizer_steps, plan.samples_per_prompt, config.rollout.max_tokens))
    check_models(config, algorithm)
    model = load_causal(folder / "model", config.model, trainable=True, spread=config.train.spreads)
    return build_learners(config, TorchBackend(model, config.train, 10), folder / "model", algorithm, plan, 10, controller)


def learned(folder, degrees, beside, heat=None):
    """What the models say of a rollout, what an update finds, and the critic's gradients. On other ranks than the first these alone."""
    config, grads = config_of(folder, degrees, beside), {}
    job = None if degrees is None else Job(Watchdog(folder, 60))
    controls = job is None or job.is_controller
    learners = learners_of(config, folder, job if job is not None and controls else LOCAL)
    critic = learners.models.critic.backend
    critic = critic._held if isinstance(critic, Controlled) else critic
    step = critic.optim_step

    def stepping():
        grads.update({name: whole(p.grad).clone() for name, p in critic.model.hf.named_parameters()})
        return step()

    critic.optim_step = stepping
    if job is not None and not controls:
        job.share(LOSSES, learners.algorithm)
        job.serve_calls({name: Target(model, Mirror) for name, model in learners.models.by_name.items()})
        return None, None, grads
    batch = learners.annotate(batch_of([replace(sample, temperature=heat or sample.temperature) for sample in samples()]))
    batch, _ = learners.algorithm.assign_credit(batch)
    update = learners.update(batch, Progress())
    if job is not None:
        job.end()
    told = {name: metric.value for name, metric in update.metrics.items() if name.startswith(("policy/", "critic/", "optim/"))}
    return (batch.values, batch.ref_logprobs, batch.teacher_logprobs), told, grads


OTHERS = {"critic": {"tensor": 2}, "reference": {"replicate": 2}, "teacher": {"tensor": 2}}


@pytest.mark.parametrize(
    ("degrees", "beside"),
    [
        ({"shard": 2}, OTHERS),
        pytest.param({"shard": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"tensor": 2}, {}, marks=pytest.mark.slow),
        pytest.param({"context": 2}, {"critic": {"shard": 2}, "teacher": {"tensor": 2}}, marks=pytest.mark.slow),
    ],
)
def test_models_beside_the_policy_are_one_processes_on_any_layout(folder, degrees, beside):
    columns, told, grads = learned(folder, None, {})
    assert all(bool(column.any()) for column in columns)
    found, other = on_ranks(2, learned, folder, degrees, beside)
    torch.testing.assert_close(found[0], columns, rtol=1e-5, atol=1e-5)
    for shared in ("critic/shared", "policy/shared"):  # which samples share a row
        found[1].pop(shared, None)
    assert found[1] == pytest.approx({name: told[name] for name in found[1]}, rel=1e-5, abs=1e-5)
    assert {"policy/loss", "critic/loss", "policy/kl_ref"} <= found[1].keys()
    assert max(relative(found[2][name], grads[name]) for name in grads) < 1e-5
    assert found[2].keys() == other[2].keys() and all(torch.equal(found[2][name], other[2][name]) for name in grads)


def test_a_teacher_at_a_server_is_asked_by_the_first_of_several_processes(folder):
    columns, told, _ = learned(folder, None, {}, 1.0)
    with live(folder / "teacher") as server:
        found, _ = on_ranks(2, learned, folder, {"shard": 2}, {"urls": [server.url]}, 1.0)
    torch.testing.assert_close(found[0], columns, rtol=1e-4, atol=1e-4)
    assert found[1]["policy/loss"] == pytest.approx(told["policy/loss"], rel=1e-4, abs=1e-4)


def test_another_number_of_processes_is_refused(folder):
    for degrees, wanted in ((None, 1), ({"shard": 4}, 4)):
        config = config_of(folder, degrees, {"teacher": {"tensor": 2}})
        words = rf"teacher\.parallel asks for 2 processes .* but the policy has {wanted}, .* leave teacher\.parallel out"
        with pytest.raises(ValueError, match=words):
            check_models(config, build_algorithm(config.algo, StepPlan(1)))


def test_a_layout_that_cannot_be_compiled_is_refused_by_its_own_key(folder):
    config = config_of(folder, {"shard": 2}, {"teacher": {"tensor": 2}})
    config = config.model_copy(update={"train": config.train.model_copy(update={"compile": True})})
    with pytest.raises(ValueError, match=r"train\.compile does not go with teacher\.parallel\.tensor \(2\)"):
        check_models(config, build_algorithm(config.algo, StepPlan(1)))


def refused(folder, beside):
    config = config_of(folder, {"shard": 4}, beside)
    with pytest.raises(ValueError) as caught:
        learners_of(config, folder)
    return str(caught.value)


@pytest.mark.parametrize("name", ["critic", "reference", "teacher"])
def test_degrees_of_a_models_own_that_it_cannot_be_cut_by_are_refused_by_their_key(folder, name):
    for text in on_ranks(4, refused, folder, {name: {"tensor": 4}}):
        assert text.startswith(f"{name}.parallel: Qwen3For") and "4 heads and 2 of keys and values, which 4 ranks cannot share" in text


def test_an_adapters_base_has_the_policys_layout(folder):
    train = {"lora": {"rank": 2}, "parallel": {"shard": 2}}
    algo, reference = {"name": "grpo", "kl_coef": 0.1}, {"parallel": {"replicate": 2}}
    config = run_config(folder, "run", algo=algo, train=train, reference=reference)
    with pytest.raises(ValueError, match=r"reference\.parallel is set, but the reference of an adapter is its base"):
        check_models(config, build_algorithm(config.algo, StepPlan(1)))


def compared(folder, degrees):
    """A step of a reward model's training."""
    model = load_scalar(folder, ON_CPU, trainable=True, new_head="normal", seed=1, spread=degrees is not None)
    backend = backend_of(model, degrees)
    found = backend.forward_backward(pairs(), reward_model_loss(RewardModelConfig()))
    grads = {name: whole(p.grad).clone() for name, p in backend.model.hf.named_parameters()}
    return found.loss, grads, backend.optim_step()["optim/grad_norm"].value


def test_a_reward_model_is_trained_by_ranks_as_by_one_process(folder):
    loss, grads, norm = compared(folder / "model", None)
    for found in on_ranks(2, compared, folder / "model", ParallelConfig(shard=2)):
        assert (found[0], found[2]) == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))
        assert max(relative(found[1][name], grads[name]) for name in grads) < 1e-5
