"""Where a learning signal may come from, and where it may go: rewards of single tokens, and the environment's tokens as trained ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.learning import chance_of_wanted, make_start, rl_config
from whet.observe.records import read_records
from whet.runs.commands import train
from whet.types import Origin

BY_TOKEN = {"name": f"{Path(__file__).parent / 'token_reward.py'}:score"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signals")
    make_start(folder)
    return folder


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "grpo"])
def test_rewards_of_single_tokens_teach(folder, name):
    train(rl_config(folder, name, folder / "start/model", algo={"name": name}, reward=BY_TOKEN))
    before, after = (chance_of_wanted(folder / run / "model") for run in ("start", name))
    assert after > before + 0.3
    rows = read_records(folder / name / "rollouts")
    paid = [(row["origin"][t - 1], row["origin"][t]) for row in rows for t, x in enumerate(row["token_rewards"]) if x]
    assert set(paid) == {(Origin.ENVIRONMENT, Origin.MODEL)} and len(paid) < len(rows)
    assert all(row["reward"] == 0 for row in rows)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["reward/total"] == 0 and lines[-1]["reward/of_tokens"] > lines[0]["reward/of_tokens"] + 0.2


def test_the_environments_tokens_train_on_request_with_a_ratio_of_1_to_themselves(folder):
    batch = {"prompts_per_rollout": 4, "samples_per_prompt": 8, "steps_per_rollout": 2, "train_on": "all"}
    algo = {"name": "grpo", "correction": {"weights": "token", "veto": 1e-3}}
    train(rl_config(folder, "all", folder / "start/model", algo=algo, batch=batch, num_rollouts=2))
    rows = [row for row in read_records(folder / "all/rollouts") if any(row["advantages"])]
    assert rows
    for row in rows:
        assert row["loss_mask"] == [origin != Origin.PROMPT for origin in row["origin"]]
        assert all((a != 0) == trains for a, trains in zip(row["advantages"], row["loss_mask"], strict=True))
        assert all(x < 0 for x, trains in zip(row["train_logprobs"], row["loss_mask"], strict=True) if trains)
    with pytest.raises(ValueError, match="the engine has no log-probs of what the environment wrote"):
        train(rl_config(folder, "no", folder / "start/model", algo={"name": "grpo", "old_logprobs": "rollout"}, batch=batch))
