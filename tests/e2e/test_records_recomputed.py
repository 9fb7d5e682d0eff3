"""Records alone give what the optimizer used: TD errors, advantages, ratios, clips and the loss, again from the formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.e2e.tiny_run import HERE, make_files, metrics_of, run_config
from whet.core.choices import Clip
from whet.observe.records import read_records
from whet.runs.commands import train

pytestmark = pytest.mark.long

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
GAMMA, LAM, KL_REWARD = 0.95, 0.9, 0.05
ENTROPY, KL = 0.01, 0.1
RUN: dict[str, Any] = {
    "num_rollouts": 2,
    "batch": {"epochs": 2},
    "env": {"name": f"{HERE / 'two_turns.py'}:TwoTurns", "parser": "none"},
    "rollout": {"max_turns": 2, "max_turn_tokens": 6, "max_tokens": 120, "stop_token_ids": list(range(0, 300, 6))},
    "train": {"optim": {"lr": 2e-2}, "rows": "forest"},
}
PPO = {
    "algo": {"name": "ppo", "gamma": GAMMA, "lam": LAM, "bootstrap_truncated": True, "kl_reward": {"coef": KL_REWARD}, "clip_dual": 1.5},
    "critic": {"optim": {"lr": 1e-2}},
}
CASES: dict[str, dict[str, Any]] = {
    "ppo": PPO,
    "grpo": {"algo": {"name": "grpo", "entropy_coef": ENTROPY, "kl_coef": KL, "clip_high": 0.28}},
    "gspo": {"algo": {"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}},
    "cispo": {"algo": {"name": "cispo", "clip_high": 0.1}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recomputed")
    make_files(folder)
    return folder


@pytest.fixture(scope="module", params=CASES)
def played(request, folder):
    """The algorithm, the rows of each rollout, and the metrics."""
    name = request.param
    train(run_config(folder, name, **RUN, **CASES[name]))
    rows = read_records(folder / name / "rollouts")
    for row in rows:
        for key, value in row.items():
            if isinstance(value, list) and (not value or not isinstance(value[0], dict)):
                row[key] = np.array([math.nan if x is None else x for x in value], np.float64)
        row["trains"] = ~np.isnan(row["first_weights"])
    return name, [[row for row in rows if row["rollout_id"] == i] for i in range(2)], metrics_of(folder / name)


def test_the_runs_hold_what_is_to_be_recomputed(played):
    """Tokens of the environment, cut trajectories, two epochs of which the second is off-policy, and samples with several lengths."""
    _, rollouts, metrics = played
    rows = [row for rows in rollouts for row in rows]
    assert all((row["origin"] == 2).any() for row in rows if len(row["turns"]) > 1) and any(len(row["turns"]) > 1 for row in rows)
    assert "truncated" in {row["outcome"] for row in rows} and len({len(row["tokens"]) for row in rows}) > 1
    last = np.concatenate([row["last_ratio"][row["trains"]] for row in rows])
    assert np.nanmax(np.abs(last - 1)) > 0.05
    codes = np.concatenate([row["last_clip"][row["trains"]] for row in rows])
    assert {Clip.NONE} < {Clip(int(code)) for code in codes}
    assert metrics[0]["train/shared"] > 0, "rows are forests"


def test_td_errors_and_advantages(played):
    name, rollouts, _ = played
    for rows in rollouts:
        if name == "ppo":
            found = [gae_of(row) for row in rows]
            for row, (errors, advantages) in zip(rows, found, strict=True):
                np.testing.assert_allclose(row["td_errors"][row["trains"]], errors, **CLOSE)
                np.testing.assert_allclose(row["returns"][row["trains"]], advantages + row["values"][row["trains"]], **CLOSE)
                kl = row["old_logprobs"] - row["ref_logprobs"]
                np.testing.assert_allclose(row["kl_rewards"][row["trains"]], -KL_REWARD * kl[row["trains"]], **CLOSE)
            every = np.concatenate([advantages for _, advantages in found])
            expected = [(advantages - every.mean()) / math.sqrt(every.var(ddof=1) + 1e-8) for _, advantages in found]
        else:
            expected = []
            for row in rows:
                group = np.array([other["reward"] for other in rows if other["group"] == row["group"]])
                assert (row["group_size"], row["group_mean"]) == (len(group), pytest.approx(group.mean()))
                assert row["group_std"] == pytest.approx(group.std(ddof=1))
                expected.append(np.full(row["trains"].sum(), (row["reward"] - group.mean()) / (group.std(ddof=1) + 1e-6)))
        for row, advantages in zip(rows, expected, strict=True):
            np.testing.assert_allclose(row["advantages"][row["trains"]], advantages, rtol=1e-5, atol=1e-5)
            assert not row["advantages"][~row["trains"]].any()
            assert row["mean_abs_advantage"] == pytest.approx(np.abs(advantages).mean(), rel=1e-5)


def gae_of(row) -> tuple[np.ndarray, np.ndarray]:
    """TD errors and advantages of a trajectory's trained tokens."""
    places = np.flatnonzero(row["trains"])
    rewards = row["kl_rewards"][places].copy()
    rewards[-1] += row["reward"]
    values = np.append(row["values"][places], row["value_after"] if row["outcome"] == "truncated" else 0.0)
    errors = rewards + GAMMA * values[1:] - values[:-1]
    advantages = np.zeros(len(errors) + 1)
    for t in reversed(range(len(errors))):
        advantages[t] = errors[t] + GAMMA * LAM * advantages[t + 1]
    return errors, advantages[:-1]


@pytest.mark.parametrize("use", ["first", "last"])
def test_ratios_clips_weights_and_losses(played, use):
    name, rollouts, _ = played
    skipped = 0
    for rows in rollouts:
        trained = sum(row["trains"].sum() for row in rows)
        for row in rows:
            t = row["trains"]
            weights = np.full(t.sum(), 1 / trained if name in ("ppo", "cispo") else 1 / t.sum() / len(rows))
            np.testing.assert_allclose(row[f"{use}_weights"][t], weights, **CLOSE)
            new, old, advantages = row[f"{use}_logprobs"][t], row["old_logprobs"][t], row["advantages"][t]
            if (row[f"{use}_clip"][t] == Clip.SKIPPED).any():
                skipped += 1
                assert not advantages.any() and not row[f"{use}_losses"][t].any() and (row[f"{use}_clip"][t] == Clip.SKIPPED).all()
                assert all(np.isnan(row[f"{use}_{key}"]).all() for key in ("logprobs", "entropy", "ranks", "ratio", "correction"))
                continue
            np.testing.assert_allclose(row["train_logprobs"][t], old)
            ratio, codes, losses = {"gspo": gspo, "cispo": cispo}.get(name, clipped)(name, new - old, new, advantages)
            np.testing.assert_allclose(row[f"{use}_ratio"][t], ratio, **CLOSE)
            assert (row[f"{use}_clip"][t] == codes).all()
            if name == "grpo":
                distance = row["ref_logprobs"][t] - new
                losses = losses - ENTROPY * row[f"{use}_entropy"][t] + KL * (np.exp(distance) - 1 - distance)
            np.testing.assert_allclose(row[f"{use}_losses"][t], weights * losses, rtol=1e-5, atol=1e-7)
            assert (row[f"{use}_ranks"][t] >= 1).all() and np.isnan(row[f"{use}_losses"][~t]).all()
    assert bool(skipped) == (name in ("gspo", "cispo")), "some groups have equal rewards, and so no gradient there"


def clipped(name: str, log_ratio, new, advantages):
    high, dual = (1.28, math.inf) if name == "grpo" else (1.2, 1.5)
    ratio = np.exp(log_ratio)
    losses = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, high) * advantages)
    codes = np.where((advantages > 0) & (ratio > high), Clip.HIGH, np.where((advantages < 0) & (ratio < 0.8), Clip.LOW, Clip.NONE))
    over = (advantages < 0) & (ratio > dual)
    return ratio, np.where(over, Clip.DUAL, codes), np.where(over, -dual * advantages if dual < math.inf else 0.0, losses)


def gspo(name: str, log_ratio, new, advantages):
    ratio = np.full(len(log_ratio), math.exp(log_ratio.mean()))
    losses = -np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    codes = np.where((advantages > 0) & (ratio > 1.2), Clip.HIGH, np.where((advantages < 0) & (ratio < 0.8), Clip.LOW, Clip.NONE))
    return ratio, codes, losses


def cispo(name: str, log_ratio, new, advantages):
    ratio = np.exp(log_ratio)
    return ratio, np.where(ratio > 1.1, Clip.HIGH, Clip.NONE), -np.minimum(ratio, 1.1) * advantages * new


def test_the_shares_of_the_loss_add_up_to_the_loss(played):
    _, rollouts, metrics = played
    for rows, line in zip(rollouts, metrics, strict=True):
        steps = [sum(row[f"{use}_losses"][row["trains"]].sum() for row in rows) for use in ("first", "last")]
        assert sum(steps) / 2 == pytest.approx(line["policy/loss"], rel=1e-5, abs=1e-7)
        codes = np.concatenate([row[f"{use}_clip"][row["trains"]] for row in rows for use in ("first", "last")])
        codes = codes[codes != Clip.SKIPPED]
        assert (codes != Clip.NONE).mean() == pytest.approx(line["policy/clip_fraction"], abs=1e-6)
