"""Advice names settings that there are, and that the run's algorithm reads."""

from __future__ import annotations

import re

import pytest
from pydantic import TypeAdapter

from whet.algo.config import AlgorithmConfig, MaxRLConfig
from whet.algo.table import ALGORITHMS
from whet.check.budget import reference_advice
from whet.config import describe_table
from whet.settings.rl import RunConfig


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_reference_is_done_without_by_keys_of_the_algorithm(name):
    keys = re.findall(r"algo\.[\w.]+", reference_advice(name))
    known = {doc.path for doc in describe_table(RunConfig, f"algo.{name}")}
    assert len(keys) == 3 and set(keys) <= known
    TypeAdapter(AlgorithmConfig).validate_python({"name": name, "kl_coef": 0, "kl_reward": {"coef": 0}})


def test_a_kl_in_maxrls_reward_is_refused_as_settings_are_read():
    with pytest.raises(ValueError, match=r"kl_reward\.coef=0\.1 makes rewards negative"):
        MaxRLConfig.model_validate({"kl_reward": {"coef": 0.1}})
    MaxRLConfig(kl_coef=0.1)
