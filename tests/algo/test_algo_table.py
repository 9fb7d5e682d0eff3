from __future__ import annotations

import pytest
import torch

from tests.algo.algo_batches import outputs, rollout
from whet.algo.base import StepPlan
from whet.algo.config import AlgorithmConfig, CustomAlgorithmConfig, GRPOConfig
from whet.algo.grpo import grpo
from whet.algo.sft import sft_loss
from whet.algo.table import build_algorithm
from whet.config import Config, ConfigError, load_config
from whet.observe.metrics import flatten, merge_metrics


class Settings(Config):
    algo: AlgorithmConfig = GRPOConfig()


def my_algorithm(options, plan):
    algorithm = grpo(GRPOConfig(), plan, "mine")
    algorithm.given = options, plan
    return algorithm


def no_algorithm(options, plan):
    return "loss"


def broken(options, plan):
    return options["beta"]


def of_one(options):
    return options


def test_the_built_in_one_gets_its_settings():
    algorithm = build_algorithm(GRPOConfig(clip_high=0.28), StepPlan(3))
    assert algorithm.name == "grpo"
    assert algorithm.config.clip_high == 0.28 and algorithm.old_logprobs == "recompute"


def test_an_algorithm_of_your_own_gets_options_and_plan():
    config = CustomAlgorithmConfig(name="tests.algo.test_algo_table:my_algorithm", options={"beta": 2})
    algorithm = build_algorithm(config, StepPlan(3))
    assert algorithm.name == "mine" and algorithm.given == ({"beta": 2}, StepPlan(3))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_algorithm", "made a str, which has no needs, entropy_grad, reducer, prepare, assign_credit, loss"),
        ("broken", r"it cannot be made: KeyError: 'beta' \(.*test_algo_table\.py:\d+\)"),
        ("of_one", r"cannot be called as f\(options, plan\): too many positional arguments"),
        ("torch", "is a module, not a function or class"),
    ],
)
def test_what_makes_no_algorithm_is_refused(name, words):
    with pytest.raises(ValueError, match=rf"algorithm 'tests.algo.test_algo_table:{name}':? {words}"):
        build_algorithm(CustomAlgorithmConfig(name=f"tests.algo.test_algo_table:{name}"), StepPlan(1))


def test_an_unknown_one_names_those_there_are():
    words = r'algo.name = "gpro": expected one of grpo, dr_grpo, .*, ppo, module:function; did you mean .*grpo'
    with pytest.raises(ConfigError, match=words):
        load_config(Settings, None, ["algo.name=gpro"])


def test_sft_is_the_negative_log_likelihood_of_the_trained_tokens():
    batch = rollout(("a", 0.0, True, [".##.#"]), ("b", 0.0, True, ["..."]), ("c", 0.0, True, [".#"]))
    out = outputs(batch)
    found = sft_loss(batch, out)
    found.terms.sum().backward()
    assert out.logprobs.grad.tolist() == [-1.0 if trained else 0.0 for trained in batch.loss_mask.tolist()]
    expected = -out.logprobs.detach()[batch.loss_mask].double()
    assert flatten(found.metrics) == {"sft/loss": pytest.approx(float(expected.mean())), "sft/tokens": 4.0}


def test_sft_metrics_do_not_depend_on_the_cut():
    batch = rollout(("a", 0.0, True, [".##.#"]), ("c", 0.0, True, [".#"]))
    out = outputs(batch)
    cut = [type(out)(out.logprobs[a:b], out.entropy[a:b]) for a, b in ((0, 5), (5, 7))]
    parts = [sft_loss(batch.select([i]), piece).metrics for i, piece in enumerate(cut)]
    assert flatten(merge_metrics(*parts)) == pytest.approx(flatten(sft_loss(batch, out).metrics))
    assert torch.equal(sft_loss(batch, out).terms[batch.loss_mask.logical_not()].detach(), torch.zeros(3))


def test_settings_reach_an_algorithm_that_is_not_the_default(tmp_path):
    path = tmp_path / "algo.toml"
    path.write_text('[algo]\nname = "gspo"\n[algo.correction]\nweights = "token"\n')
    config = load_config(Settings, path, ["algo.clip_low=0.01"])
    algorithm = build_algorithm(config.algo, StepPlan(2))
    assert algorithm.config.clip_low == 0.01 and algorithm.config.clip_high == 4e-4
    assert algorithm.config.correction.weights == "token" and algorithm.config.loss.name == "sequence"
