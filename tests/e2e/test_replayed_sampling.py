"""A run that samples from a nucleus trains on it: settings to update."""

from __future__ import annotations

import pytest

from tests.e2e.tiny_run import make_files, metrics_of, run_config
from whet.runs.commands import train


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}])
def test_a_run_trains_on_what_was_sampled_with_top_p_or_top_k(tmp_path, cut):
    make_files(tmp_path)
    train(run_config(tmp_path, "run", rollout=cut, num_rollouts=2))
    lines = metrics_of(tmp_path / "run")
    assert len(lines) == 2
    for line in lines:
        assert line["mismatch/logprob_max"] < 1e-5
        assert line["optim/grad_norm"] > 0
