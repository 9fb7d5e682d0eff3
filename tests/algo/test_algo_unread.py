"""Settings that nothing would read are refused by name, whether a file or an override sets them; defaults are not."""

from __future__ import annotations

import pytest
from pydantic import Field

from whet.algo.base import StepPlan
from whet.algo.config import AlgorithmConfig, GRPOConfig
from whet.algo.table import ALGORITHMS, build_algorithm
from whet.config import Config, ConfigError, dump_toml, load_config

OWN = "tests.algo.test_algo_unread:my_algorithm"


class Settings(Config):
    algo: AlgorithmConfig = Field(default_factory=GRPOConfig)


def my_algorithm(options, plan):
    return build_algorithm(GRPOConfig(), plan)


def load(overrides, path=None):
    return load_config(Settings, path, [f"algo.{override}" for override in overrides]).algo


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["name=dr_grpo", "grpo.clip_high=0.3"], 'algo.grpo.clip_high: the settings of grpo stand in [algo] itself, and algo.name is'),
        (["gspo.kl_coef=0.1", "gspo.loss.tau_positive=1"], "write algo.name=gspo and algo.kl_coef"),
        (["gspo.loss.sequence_gradient=sequence"], "write algo.name=gspo and algo.loss.sequence_gradient"),
        ([f"name={OWN}", "ppo.lam=0.5"], f'algo.ppo.lam: the settings of ppo stand in [algo] itself, and algo.name is "{OWN}"'),
        ([f"name={OWN}", "lam=0.5"], f'algo.lam is a setting of ppo; algo.name is "{OWN}"'),
        (["options={beta = 1}"], 'algo.options is a setting of module:function; algo.name is "grpo"'),
        (["loss.name=cispo", "clip_dual=3"], "algo: clip_dual=3.0 has no effect with loss.name=cispo; set loss.name=clip or"),
        (["name=sapo", "clip_high=0.28"], "algo: clip_high=0.28 has no effect with loss.name=sapo"),
        (["name=gpg", "clip_low=0.1"], "algo: clip_low=0.1 has no effect with loss.name=reinforce"),
        (["loss.tau_positive=2"], "algo.loss: tau_positive=2.0 has no effect with name=clip; set name=sapo, or leave out"),
        (["name=sapo", "loss.covariance_share=0.5"], "set name=clip_cov or kl_cov, or leave out covariance_share"),
        (["loss.name=kl_cov", "loss.covariance_bounds=[0, 1]"], "covariance_bounds=[0.0, 1.0] has no effect with name=kl_cov"),
        (["loss.name=clip_cov", "loss.covariance_kl_coef=1"], "covariance_kl_coef=1.0 has no effect with name=clip_cov"),
        (["loss.name=clip_cov", "loss.covariance_bounds=[1, 1]"], "algo.loss: covariance_bounds=[1.0, 1.0]: the first must be below"),
        (["loss.sequence_gradient=sequence"], "set name=sequence, or leave out sequence_gradient"),
        (["loss.options={a = 1}"], "options={a = 1} has no effect with name=clip, which is built in; name a module:function"),
        (["loss.name=sapu"], "algo.loss: name: there is no policy loss 'sapu'; did you mean sapo?"),
        (["correction.high=5"], "algo.correction: high=5.0 has no effect without weights, which it bounds; set weights"),
        (["correction.bound=mask"], "bound=\"mask\" has no effect without weights"),
        (["correction.weights=token", "correction.low=0.1"], "low=0.1 has no effect with bound=truncate"),
        (["correction.weights=token", "correction.rejected=mask"], 'rejected="mask" has no effect where nothing is rejected'),
        (["kl_reward.target=0.1"], "algo.kl_reward: target=0.1 has no effect with coef=0, from which no coefficient adapts"),
        (["kl_reward.coef=0.1", "kl_reward.horizon=9"], "horizon=9 has no effect with a fixed coefficient; set target"),
        (["reducer_scale=9"], "algo: reducer_scale=9.0 has no effect with reducer=sample_mean; set reducer=constant_length or constant"),
        (["kl_unbiased=true"], "algo: kl_unbiased=true has no effect without a KL to a reference; set kl_coef, or reference=true"),
        (["kl_estimator=k2", "reference=false"], 'algo: kl_estimator="k2" has no effect without a KL to a reference'),
        (["old_logprobs=current", "mask_delta=1e-4"], "algo: mask_delta=0.0001 has no effect with old_logprobs=current"),
        (["old_logprobs=current", "distill_coef=1"], "algo: old_logprobs=current is known in the step alone, but needed before it by"),
        (["name=otb", "old_logprobs=current"], "but needed before it by the credit; use recompute or auto"),
        (["kl_coef=inf"], "algo.kl_coef = inf: expected a finite number"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused_by_name(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load(overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [*ALGORITHMS, OWN])
def test_a_kept_configuration_with_all_its_defaults_is_read_again(name, tmp_path):
    config = load([f"name={name}", "entropy_coef=0.01" if name in ALGORITHMS else "options={beta = 1}"])
    kept = tmp_path / "config.toml"
    kept.write_text(dump_toml(Settings(algo=config)))
    assert load([], kept) == config
    assert kept.read_text().startswith(f'[algo]\nname = "{name}"\n')
    assert ("[algo.loss]" in kept.read_text()) == (name in ALGORITHMS)
    assert build_algorithm(config, StepPlan(2, max_tokens=8)) is not None


@pytest.mark.parametrize(
    "overrides",
    [
        ["name=rloo", "loss.name=sapo", "loss.tau_negative=2"],
        ["name=gspo", "clip_dual=3", "loss.sequence_gradient=sequence"],
        ["loss.name=clip_cov", "loss.covariance_bounds=[0, 1]", "clip_high=0.3"],
        ["loss.name=kl_cov", "loss.covariance_kl_coef=1", "loss.covariance_share=0.5"],
        ["loss.name=mine:loss", "loss.options={a = 1}"],
        ["correction.weights=token", "correction.bound=mask", "correction.low=0.1", "correction.rejected=mask"],
        ["correction.veto=0.1", "correction.rejected=mask"],
        ["kl_reward.coef=0.1", "kl_reward.target=0.1", "kl_reward.horizon=9"],
        ["reducer=constant", "reducer_scale=9"],
        ["reference=true", "kl_unbiased=true", "kl_estimator=k2"],
        ["kl_reward.coef=0.1", "kl_unbiased=true"],
        ["old_logprobs=rollout", "mask_delta=1e-4"],
    ],
)
def test_settings_that_are_read_are_accepted(overrides):
    load(overrides)


def test_an_unknown_algorithm_is_said_to_be_unknown():
    with pytest.raises(ConfigError, match=r'algo.name = "dr_grop": expected one of grpo, .*, module:function; did you mean dr_grpo'):
        load(["name=dr_grop", "kl_coef=0.1"])
