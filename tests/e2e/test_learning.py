"""Every algorithm learns, seen on one task: conversations of two turns, where the second answer is to be one of two words.

Each run is measured by the same check, twice: as it is, and with its advantages (or preferences, or lessons) turned round. The check
has to pass the first time and to fail the second.
"""

from __future__ import annotations

import json

import pytest

from tests.e2e.learning import (
    chance_of_wanted,
    dpo_config,
    make_start,
    pairs,
    rated,
    rated_pairs,
    rl_config,
    rm_config,
    sft_config,
    talks,
    write_rows,
)
from tests.lots import long_after
from whet.algo.policy import PolicyGradient
from whet.observe.records import read_records
from whet.runs.commands import train
from whet.runs.supervised import train_on_data
from whet.types import Origin

MARGIN = 0.3
"""By how much the chance of the wanted answer has to rise, from about a half."""
RL = {
    name: {}
    for name in (
        "grpo",
        "dr_grpo",
        "gspo",
        "cispo",
        "sapo",
        "gmpo",
        "rloo",
        "opo",
        "gpg",
        "maxrl",
        "otb",
        "remax",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    )
}
"""What differs in an algorithm's run."""
RL["grpo_passk"] = {"batch": {"prompts_per_rollout": 16, "samples_per_prompt": 2, "steps_per_rollout": 2}}  # only a single best teaches
# With the greedy reply as its baseline only errors teach once most replies are right: a large step then unlearns what was learned.
RL["remax"] = {"train": {"optim": {"lr": 1.5e-3}}}
RL["ppo"] = {
    "algo": {"name": "ppo", "lam": 0.95},
    "critic": {"optim": {"lr": 1e-2}, "warmup_rollouts": 2},
    "train": {"optim": {"lr": 1.5e-3}},
    "num_rollouts": 12,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning")
    make_start(folder)
    return folder


def check_learned(folder, name: str, **measure: bool) -> None:
    """The chance of the wanted answer rose by the margin from the start to the model of run `name`."""
    before, after = (chance_of_wanted(folder / run / "model", **measure) for run in ("start", name))
    assert 0.4 < before < 0.6, "there is something to learn, and to unlearn"
    assert after >= before + MARGIN, f"the chance of the wanted answer went from {before:.3f} to {after:.3f}"


def check_not_learned(folder, name: str, **measure: bool) -> None:
    """The same check fails, by as much: what was learned is the opposite."""
    with pytest.raises(AssertionError, match="the chance of the wanted answer went"):
        check_learned(folder, name, **measure)
    assert chance_of_wanted(folder / name / "model", **measure) < 0.2


def turn_round(monkeypatch) -> None:
    """Change the sign of every advantage."""
    assign = PolicyGradient.assign_credit

    def turned(self, batch):
        batch, metrics = assign(self, batch)
        return batch.with_(advantages=-batch.advantages), metrics

    monkeypatch.setattr(PolicyGradient, "assign_credit", turned)


@pytest.mark.parametrize("name", long_after(2, sorted(RL, key=lambda name: name not in ("grpo", "ppo"))))
def test_an_rl_algorithm_learns(folder, name):
    train(rl_config(folder, name, folder / "start/model", **{"algo": {"name": name}, **RL[name]}))
    check_learned(folder, name)
    rewards = logged(folder / name, "reward/total")
    best = max(rewards[-3:])  # a single rollout may fall back: what is learned in seconds is learned in large steps
    assert best >= rewards[0] + MARGIN, "what it samples is what was wanted, too, to the end of the word"
    check_tokens(folder / name, RL[name])


@pytest.mark.parametrize("name", long_after(2, sorted(RL, key=lambda name: name not in ("grpo", "ppo"))))
def test_with_its_advantages_turned_round_it_does_not(folder, name, monkeypatch):
    turn_round(monkeypatch)
    train(rl_config(folder, f"{name}-turned", folder / "start/model", **{"algo": {"name": name}, **RL[name]}))
    check_not_learned(folder, f"{name}-turned")


def logged(run_dir, metric: str) -> list[float]:
    return [json.loads(line)[metric] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


MOST_CUT = {"otb": 0.02}
"""The policy of one of its rollouts says the wanted word in the first turn, too, again and again (3 of 288 were cut)."""


def check_tokens(run_dir, settings) -> None:
    """What the environment wrote between the two turns never trained; what the model wrote did, in both; a greedy trajectory never did."""
    found = read_records(run_dir / "rollouts")
    whole = [row for row in found if row["outcome"] == "completed"]
    assert len(whole) > (1 - MOST_CUT.get(run_dir.name, 0.01)) * len(found), "hardly any was cut"
    cut = [(row["outcome"], row["turns"][-1]["finish"], row["turns"][-1]["num_tokens"]) for row in found if row not in whole]
    assert set(cut) <= {("truncated", "length", 4)}, "and what was, by the limit of a turn"
    assert all(len(row["turns"]) == 2 and Origin.ENVIRONMENT in row["origin"] for row in whole)
    assert not any(trains for row in found if row["baseline"] for trains in row["loss_mask"])
    rows = [row for row in found if not row["baseline"]]
    for row in rows:
        by_model = [origin == Origin.MODEL for origin in row["origin"]]
        assert row["loss_mask"] == by_model or not row["valid"]
        assert all(a == 0 for a, mine in zip(row["advantages"], by_model, strict=True) if not mine)
    assert any(a != 0 for row in rows for a in row["advantages"])
    steps = logged(run_dir, "run/optimizer_step")
    warmup = settings.get("critic", {}).get("warmup_rollouts", 0)
    assert steps == [2.0 * max(i + 1 - warmup, 0) for i in range(len(steps))], "every rollout fed two steps"


@pytest.fixture(scope="module")
def teachers(folder):
    """Two models that began as the policy did: one says the wanted answer, the other the other."""
    found = {}
    for word, share in (("wanted", 1.0), ("other", 0.0)):
        data = write_rows(folder / f"teacher-{word}.jsonl", talks(32, share, seed=3))
        train_on_data(sft_config(folder, f"teacher-{word}", data, folder / "start/model", num_steps=10))
        found[word] = str(folder / f"teacher-{word}/model")
    return found


def distillation_config(folder, name, teacher):
    """No reward tells the answers apart: whatever is learned is the teacher's."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    data = write_rows(folder / "unrewarded.jsonl", [{**row, "label": "neither"} for row in rows])
    algo = {"name": "grpo", "distill_coef": 1.0}
    more = {"teacher": {"path": teacher}, "data": {"train": str(data)}, "stop_after_constant_rewards": 3}  # which is not for lessons
    return rl_config(folder, name, folder / "start/model", algo=algo, **more)


def test_distillation_learns_what_its_teacher_says(folder, teachers):
    train(distillation_config(folder, "opd", teachers["wanted"]))
    check_learned(folder, "opd")
    check_tokens(folder / "opd", {})
    assert {row["reward"] for row in read_records(folder / "opd/rollouts")} == {0.0}


@pytest.mark.long
@pytest.mark.parametrize("which", ["advantages", "teacher"])
def test_distillation_turned_round_learns_the_opposite(folder, teachers, monkeypatch, which):
    if which == "advantages":
        turn_round(monkeypatch)
    train(distillation_config(folder, f"opd-{which}", teachers["other" if which == "teacher" else "wanted"]))
    check_not_learned(folder, f"opd-{which}")


@pytest.mark.parametrize("turned", [False, True])
def test_sft_learns_what_its_conversations_say(folder, turned):
    name = f"sft-{turned}"
    data = write_rows(folder / f"{name}.jsonl", talks(32, 0.0 if turned else 1.0, seed=2))
    train_on_data(sft_config(folder, name, data, folder / "start/model", num_steps=10))
    (check_not_learned if turned else check_learned)(folder, name)


@pytest.mark.parametrize("turned", [False, True])
def test_dpo_learns_what_its_pairs_prefer(folder, turned):
    """Which of the two is likelier: how likely both are together is not in the loss."""
    name = f"dpo-{turned}"
    data = write_rows(folder / f"{name}.jsonl", pairs(flipped=turned))
    train_on_data(dpo_config(folder, name, data, folder / "start/model", num_steps=15))
    (check_not_learned if turned else check_learned)(folder, name, of_both=True)


@pytest.fixture(scope="module")
def unrated(folder):
    """A reward model as it is before it learns: the decoder that every run begins with, and a new head."""
    data = write_rows(folder / "rm-start.jsonl", rated_pairs(held_out=False))
    train_on_data(rm_config(folder, "rm-start", data, folder / "start/model", num_steps=1, lr=0.0))


def check_rated(folder, name: str) -> None:
    """Over pairs of answers that were held out, more are scored the right way round than before, and by more."""
    held = rated_pairs(held_out=True)
    (right, margin), (right_now, margin_now) = (rated(folder / run / "model", held) for run in ("rm-start", name))
    assert 0.2 < right < 0.8, "there is something to learn, and to unlearn"
    assert right_now >= right + 0.2, f"held-out accuracy went from {right:.3f} to {right_now:.3f}"
    assert margin_now >= margin + 1, f"the held-out margin went from {margin:.3f} to {margin_now:.3f}"


@pytest.mark.parametrize("turned", [False, True])
def test_a_reward_model_learns_what_its_pairs_prefer(folder, unrated, turned):
    name = f"rm-{turned}"
    data = write_rows(folder / f"{name}.jsonl", rated_pairs(held_out=False, flipped=turned))
    train_on_data(rm_config(folder, name, data, folder / "start/model", num_steps=60, lr=3e-3))
    if not turned:
        check_rated(folder, name)
        return
    with pytest.raises(AssertionError, match="held-out accuracy went from"):
        check_rated(folder, name)
    right, margin = rated(folder / name / "model", rated_pairs(held_out=True))
    assert right < 0.2 and margin < -1, f"what was learned is the opposite: {right:.3f} of the pairs, by {margin:.3f}"
