"""The quickstart at full length learns what docs/quickstart.md says, and its mask is what was sampled. Minutes; run by `make test-all`."""

import json

import pytest

from tests.e2e.sampling_spy import Spy
from whet.quickstart.run import QuickstartConfig, run_quickstart


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_learns_to_use_the_calculator(tmp_path, monkeypatch, seed):
    spy = Spy(monkeypatch)
    results = run_quickstart(QuickstartConfig(seed=seed, run_dir=str(tmp_path)))
    assert results["accuracy_rl"] >= 0.80
    assert results["accuracy_rl"] - results["accuracy_warmup"] >= 0.25
    assert results["tool_call_validity_rl"] >= 0.95
    spy.check()
    assert spy.environment_tokens > 10_000
    for line in (tmp_path / "rl/metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "policy/loss" in row:
            assert row["mismatch/logprob_mean"] < 1e-6
            assert row["mismatch/logprob_max"] < 1e-4
