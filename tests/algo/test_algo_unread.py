"""Settings that nothing would read are refused by name, whether a file or an override sets them; defaults are not."""

from __future__ import annotations

import pytest

from whet.algo import ALGORITHMS, AlgorithmConfig, StepPlan, build_algorithm
from whet.config import ConfigError, dump_toml, load_config

OWN = "test_algo_unread:my_algorithm"


def my_algorithm(options, plan):
    return build_algorithm(AlgorithmConfig(), plan)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["name=dr_grpo", "grpo.clip_high=0.3"], "[algo.grpo] (clip_high=0.3) has no effect with name=dr_grpo: it reads [algo.dr_grpo]"),
        (["gspo.kl_coef=0.1", "gspo.loss.tau_positive=1"], "[algo.gspo] (kl_coef=0.1) has no effect with name=grpo"),
        (["gspo.loss.sequence_gradient=sequence"], '[algo.gspo] (loss.sequence_gradient="sequence") has no effect with name=grpo'),
        ([f"name={OWN}", "ppo.lam=0.5"], "an algorithm of your own is given [algo.options] alone"),
        (["options={beta = 1}"], "options={beta = 1} has no effect with name=grpo, which is built in; write its settings below [algo.grpo"),
        (["grpo.loss.name=cispo", "grpo.clip_dual=3"], "grpo: clip_dual=3.0 has no effect with loss.name=cispo; set loss.name=clip or"),
        (["name=sapo", "sapo.clip_high=0.28"], "sapo: clip_high=0.28 has no effect with loss.name=sapo"),
        (["name=gpg", "gpg.clip_low=0.1"], "gpg: clip_low=0.1 has no effect with loss.name=reinforce"),
        (["grpo.loss.tau_positive=2"], "grpo.loss: tau_positive=2.0 has no effect with name=clip; set name=sapo, or leave out"),
        (["name=sapo", "sapo.loss.covariance_share=0.5"], "set name=clip_cov or kl_cov, or leave out covariance_share"),
        (["grpo.loss.name=kl_cov", "grpo.loss.covariance_bounds=[0, 1]"], "covariance_bounds=[0.0, 1.0] has no effect with name=kl_cov"),
        (["grpo.loss.name=clip_cov", "grpo.loss.covariance_kl_coef=1"], "covariance_kl_coef=1.0 has no effect with name=clip_cov"),
        (["grpo.loss.sequence_gradient=sequence"], "set name=sequence, or leave out sequence_gradient"),
        (["grpo.loss.options={a = 1}"], "options={a = 1} has no effect with name=clip, which is built in; name a module:function"),
        (["grpo.correction.high=5"], "grpo.correction: high=5.0 has no effect without weights, which it bounds; set weights"),
        (["grpo.correction.bound=mask"], "bound=\"mask\" has no effect without weights"),
        (["grpo.correction.weights=token", "grpo.correction.low=0.1"], "low=0.1 has no effect with bound=truncate"),
        (["grpo.correction.weights=token", "grpo.correction.rejected=mask"], 'rejected="mask" has no effect where nothing is rejected'),
        (["grpo.kl_reward.target=0.1"], "grpo.kl_reward: target=0.1 has no effect with coef=0, from which no coefficient adapts"),
        (["grpo.kl_reward.coef=0.1", "grpo.kl_reward.horizon=9"], "horizon=9 has no effect with a fixed coefficient; set target"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused_by_name(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load_config(AlgorithmConfig, None, overrides)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [*ALGORITHMS, OWN])
def test_a_kept_configuration_with_all_its_defaults_is_read_again(name, tmp_path):
    overrides = [f"name={name}"] + ([f"{name}.entropy_coef=0.01"] if name in ALGORITHMS else ["options={beta = 1}"])
    config = load_config(AlgorithmConfig, None, overrides)
    kept = tmp_path / "config.toml"
    kept.write_text(dump_toml(config))
    assert load_config(AlgorithmConfig, kept) == config
    assert "[grpo.loss]" in kept.read_text()


def test_another_table_that_only_repeats_its_defaults_is_no_mistake(tmp_path):
    path = tmp_path / "algo.toml"
    path.write_text('name = "rloo"\n[grpo]\nclip_high = 0.2\n[gspo]\nclip_high = 4e-4\nloss.tau_positive = 1.0\n[rloo]\n')
    assert build_algorithm(load_config(AlgorithmConfig, path), StepPlan(2)).name == "rloo"


@pytest.mark.parametrize(
    "overrides",
    [
        ["name=rloo", "rloo.loss.name=sapo", "rloo.loss.tau_negative=2"],
        ["name=gspo", "gspo.clip_dual=3", "gspo.loss.sequence_gradient=sequence"],
        ["grpo.loss.name=clip_cov", "grpo.loss.covariance_bounds=[0, 1]", "grpo.clip_high=0.3"],
        ["grpo.loss.name=kl_cov", "grpo.loss.covariance_kl_coef=1", "grpo.loss.covariance_share=0.5"],
        ["grpo.loss.name=mine:loss", "grpo.loss.options={a = 1}"],
        ["grpo.correction.weights=token", "grpo.correction.bound=mask", "grpo.correction.low=0.1", "grpo.correction.rejected=mask"],
        ["grpo.correction.veto=0.1", "grpo.correction.rejected=mask"],
        ["grpo.kl_reward.coef=0.1", "grpo.kl_reward.target=0.1", "grpo.kl_reward.horizon=9"],
    ],
)
def test_settings_that_are_read_are_accepted(overrides):
    load_config(AlgorithmConfig, None, overrides)


def test_an_unknown_algorithm_is_said_to_be_unknown():
    config = load_config(AlgorithmConfig, None, ["name=dr_grop", "dr_grpo.kl_coef=0.1"])
    with pytest.raises(ValueError, match="there is no algorithm 'dr_grop'"):
        build_algorithm(config, StepPlan(1))
