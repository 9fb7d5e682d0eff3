"""Advice names settings that there are, and that the run's algorithm reads."""

from __future__ import annotations

import re

import pytest

from whet.algo import ALGORITHMS, AlgorithmConfig
from whet.config.schema import key_paths
from whet.preflight.budget import reference_advice
from whet.settings import RunConfig


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_reference_is_done_without_by_keys_of_the_algorithm(name):
    keys = re.findall(r"algo\.[\w.]+", reference_advice(name))
    known = {".".join(path) for path in key_paths(RunConfig)}
    assert len(keys) == 3 and set(keys) <= known
    assert all(key.startswith(f"algo.{name}.") for key in keys)
    AlgorithmConfig.model_validate({"name": name, name: {"kl_coef": 0, "kl_reward": {"coef": 0}}})


def test_a_kl_in_maxrls_reward_is_refused_as_settings_are_read():
    with pytest.raises(ValueError, match=r"kl_reward\.coef=0\.1 makes rewards negative"):
        AlgorithmConfig.model_validate({"name": "maxrl", "maxrl": {"kl_reward": {"coef": 0.1}}})
    AlgorithmConfig.model_validate({"name": "maxrl", "maxrl": {"kl_coef": 0.1}})
