"""Keys of slime, verl and TRL are answered with whet's."""

import re

import pytest

import whet
from whet.config import ConfigError, describe, load_config
from whet.config.elsewhere import NO_SETTING, known_elsewhere, names_elsewhere
from whet.settings.rl import RunConfig
from whet.settings.supervised import RUN_CONFIGS
from whet.typed import check_typed

GOOD = ["model.path=m", "data.train=rows.jsonl", "reward.name=math"]


def told(*overrides):
    with pytest.raises(ConfigError) as error:
        load_config(RunConfig, None, [*GOOD, *overrides])
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "answer"),
    [
        ("n_samples_per_prompt", "8", "in whet it is batch.samples_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr", "1e-6", "in whet it is train.optim.lr"),
        ("algorithm.filter_groups.enable", "true", "in whet it is control.filters"),
        ("num_generations", "8", "in whet it is batch.samples_per_prompt"),
        ("learning_rate", "1e-5", "in whet it is train.optim.lr"),
        ("swiglu", "true", "whet has no setting: "),
    ],
)
def test_an_unknown_key_of_others_is_answered(key, value, answer):
    found = told(f"{key}={value}")
    assert f"{key}: unknown key; {answer}" in found


def test_several_keys_of_a_table_of_others_have_an_answer_each():
    found = told("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.rollout.n=5")
    assert "actor.optim.lr: unknown key; in whet it is train.optim.lr" in found
    assert "actor_rollout_ref.rollout.n: unknown key; in whet it is batch.samples_per_prompt" in found


def test_options_of_others_are_answered():
    with pytest.raises(ConfigError, match=r"there is no option --lr-decay-style; in whet it is train\.optim\.schedule"):
        check_typed(None, ["--lr-decay-style", "cosine"])


def test_keywords_of_others_are_answered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"num_generations: unknown key; in whet it is batch\.samples_per_prompt"):
        whet.train("model", [{"prompt": "a", "label": "b"}], reward="math", num_generations=4)


def test_every_answer_names_settings_that_there_are():
    known = {key.path for model in RUN_CONFIGS.values() for key in describe(model)}
    assert len(names_elsewhere()) > 700
    for name, answer in names_elsewhere().items():
        assert answer.strip() and name == name.replace("-", "_")
        if not answer.startswith(NO_SETTING):
            keys = re.findall(r"(?<![\w.\[\]])[a-z_]+(?:\.[a-z_]+|\.<name>)+", re.sub(r"\([^)]*\)", "", answer))
            assert set(keys) <= known, name


def test_a_key_that_nobody_has_is_not_known():
    assert known_elsewhere("num_rolouts") is None
