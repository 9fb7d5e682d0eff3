"""Runs of seconds that compare with greedy trajectories: ReMax, and an algorithm of the user's that asks for the same."""

import json
import math
import shutil

import pytest

from tests.e2e.tiny_run import checkpoints_of, make_files, metrics_of, run_config, weights_of
from whet.observe.records import read_records
from whet.rollout.metrics import RolloutFailed
from whet.runs.commands import generate, train

REMAX = {"algo": {"name": "remax"}, "checkpoint": {"interval": 1, "keep": 9}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remax")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def remax(folder):
    evaluate = {"before_training": True, "sets": {"same": {"path": str(folder / "train.jsonl")}}}
    train(run_config(folder, "remax", **REMAX, evaluate=evaluate))
    return folder / "remax"


def rollouts(run_dir):
    """The greedy row of each task and its siblings' rows, rollout by rollout."""
    out = []
    for path in sorted((run_dir / "rollouts").glob("*.parquet")):
        rows = read_records(path)
        greedy = {row["task_id"]: row for row in rows if row["baseline"]}
        out.append((greedy, [row for row in rows if not row["baseline"]]))
    return out


def test_every_task_of_every_rollout_has_one_greedy_trajectory_that_the_others_are_compared_with(remax):
    found = rollouts(remax)
    assert len(found) == 4
    for (greedy, sampled), metrics in zip(found, metrics_of(remax)[1:], strict=False):
        assert len(greedy) == 2 and len(sampled) == 6
        for row in sampled:
            trained = [a for a, m in zip(row["advantages"], row["loss_mask"], strict=True) if m]
            assert trained == pytest.approx([row["reward"] - greedy[row["task_id"]]["reward"]] * len(trained), abs=1e-6)
        for row in greedy.values():
            assert (row["temperature"], row["order"], row["advantages"]) == (0.0, None, None) and not any(row["loss_mask"])
        rewards = [row["reward"] for row in greedy.values()]
        assert metrics["baseline/reward"] == pytest.approx(sum(rewards) / 2) and metrics["baseline/excluded"] == 0
        tokens = [sum(turn["num_tokens"] for turn in row["turns"]) for row in greedy.values()]
        assert metrics["baseline/tokens/mean"] == pytest.approx(sum(tokens) / 2) and metrics["baseline/failed"] == 0


def test_a_greedy_trajectory_is_what_a_greedy_evaluation_of_the_same_weights_plays(remax):
    evaluated = read_records(remax / "evaluations/same/rollouts/rollout_000000.parquet")
    by_label = {row["label"]: row["tokens"] for row in evaluated}
    greedy, _ = rollouts(remax)[0]
    assert [row["tokens"] for row in greedy.values()] == [by_label[row["label"]] for row in greedy.values()]
    assert len({tuple(row["tokens"]) for row in greedy.values()}) == 2


def test_a_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(folder, remax):
    again = folder / "again"
    shutil.copytree(remax, again)
    for name in checkpoints_of(again):
        if name > "rollout_000002":
            shutil.rmtree(again / "checkpoints" / name)
    evaluate = {"before_training": True, "sets": {"same": {"path": str(folder / "train.jsonl")}}}
    train(run_config(folder, "again", **REMAX, evaluate=evaluate))
    assert weights_of(again) == weights_of(remax) and metrics_of(again) == metrics_of(remax)


def greedy_fails(tmp_path, when):
    """A reward that fails for greedy trajectories of some tasks."""
    (tmp_path / "picky.py").write_text(
        "def score(trajectory):\n"
        f"    if trajectory.temperature == 0 and {when}:\n"
        "        raise KeyError('greedy')\n"
        "    return len(trajectory.response) % 7 / 7\n"
    )
    return {"name": f"{tmp_path / 'picky.py'}:score"}


def test_a_task_whose_greedy_trajectory_failed_does_not_train_and_is_counted(folder, tmp_path):
    batch = {"prompts_per_rollout": 4, "samples_per_prompt": 2}
    reward = greedy_fails(tmp_path, "trajectory.task.label in '01'")
    train(run_config(folder, "picky", num_rollouts=1, batch=batch, reward=reward, **REMAX))
    ((greedy, sampled),) = rollouts(folder / "picky")
    outcomes = {row["label"]: (row["outcome"], row["reward"]) for row in greedy.values()}
    assert outcomes["0"] == outcomes["1"] == ("reward_error", None) and outcomes["2"][0] in ("completed", "truncated")
    for row in sampled:
        failed = row["label"] in "01"
        assert row["outcome"] in ("completed", "truncated") and row["reward"] is not None
        assert row["valid"] == (not failed) and any(row["advantages"]) == (not failed and row["reward"] != greedy[row["task_id"]]["reward"])
    assert any(any(row["advantages"]) for row in sampled), "the others train"
    (metrics,) = metrics_of(folder / "picky")
    assert (metrics["baseline/failed"], metrics["baseline/excluded"], metrics["outcome/failed"]) == (0.5, 4, 0)
    (noted,) = map(json.loads, (folder / "picky/failures.jsonl").read_text().splitlines())
    assert noted["trajectory"].endswith("/greedy") and noted["where"] == "reward"


def test_a_rollout_without_any_greedy_reward_ends_the_run_and_says_why(folder, tmp_path):
    config = run_config(folder, "none", num_rollouts=1, reward=greedy_fails(tmp_path, "True"), **REMAX)
    words = r"rollout 0: all 2 greedy trajectories, which the others are compared with, failed\n2 in reward"
    with pytest.raises(RolloutFailed, match=words):
        train(config)


def test_an_algorithm_of_ones_own_may_ask_for_it_and_one_sample_of_a_prompt_is_enough(folder, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from whet.algo.base import Need\n"
        "from whet.algo.credit import of_tokens\n"
        "from whet.algo.policy import PolicyGradient\n"
        "from whet.algo.policy_config import PolicyConfig\n"
        "def build(options, plan):\n"
        "    def assign(batch):\n"
        "        lead = 2 * (batch.rewards - batch.baseline)[batch.sample_of_token]\n"
        "        return of_tokens(batch, lead, lead)\n"
        "    return PolicyGradient('mine', PolicyConfig(), plan, assign, needs=frozenset({Need.BASELINE}))\n"
    )
    batch = {"prompts_per_rollout": 4, "samples_per_prompt": 1}
    train(run_config(folder, "mine", num_rollouts=1, batch=batch, algo={"name": f"{tmp_path / 'mine.py'}:build"}))
    ((greedy, sampled),) = rollouts(folder / "mine")
    assert len(greedy) == len(sampled) == 4
    for row in sampled:
        expected = 2 * (row["reward"] - greedy[row["task_id"]]["reward"])
        assert all(math.isclose(a, expected if m else 0, abs_tol=1e-6) for a, m in zip(row["advantages"], row["loss_mask"], strict=True))


def test_generate_plays_no_greedy_ones(folder):
    assert generate(run_config(folder, "generated", **REMAX), folder / "out", 2) == 6
    assert [row["baseline"] for row in read_records(folder / "out/rollouts")] == [False] * 6
