"""batch.process: what a user's function may change of a rollout's samples, and what it may not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from whet.algo.base import StepPlan
from whet.algo.config import GRPOConfig
from whet.algo.table import build_algorithm
from whet.config import ConfigError, Hook, HookFailed
from whet.core.batch import batch_of
from whet.observe.metrics import flatten
from whet.rollout.recipe import Recipe
from whet.rollout.samples import samples_of_groups
from whet.types import Failure, Finish, Group, Message, Origin, Outcome, Rewards, Task, Trajectory, Turn

REWARDS = {"a/0": 1.0, "a/1": 0.0, "a/2": 0.25, "b/0": 0.5, "b/1": -1.0, "b/2": 3.0}


def turn(version=0, restart=False, num=3):
    origin = (Origin.PROMPT, Origin.PROMPT) if restart else (Origin.ENVIRONMENT, Origin.ENVIRONMENT)
    return Turn((1, 2), origin, (5,) * num, (-0.5,) * num, (version,) * num, Message("assistant", "x"), Finish.STOP, restart=restart)


def trajectory(name, turns=None):
    task = Task(name.partition("/")[0], "p")
    return Trajectory(name, task, tuple(turns or [turn(restart=True)]), Outcome.COMPLETED, Rewards(REWARDS[name]))


def rollout():
    """Two tasks with three siblings; b/1 has two samples, b/2 failed."""
    a = [trajectory(f"a/{k}") for k in range(3)]
    b = [trajectory("b/0"), trajectory("b/1", [turn(restart=True), turn(restart=True, num=2)]), trajectory("b/2")]
    b[2] = replace(b[2], outcome=Outcome.ENV_ERROR, rewards=None, error=Failure("E", "x", "env"))
    return [Group(Task("a", "p"), tuple(a)), Group(Task("b", "p"), tuple(b))]


def make(function, **settings):
    return Recipe(process=Hook("batch.process", "my_code:process", function), **settings)


def samples(function, version=0, **settings):
    return make(function, **settings).samples(rollout(), version)


def test_what_it_leaves_alone_trains_as_without_it():
    plain, _ = Recipe().samples(rollout(), 0)
    same, metrics = samples(lambda samples, groups: samples)
    assert same == plain == samples_of_groups(rollout())
    assert flatten(metrics)["process/left_out"] == flatten(metrics)["process/masked_tokens"] == 0


def test_the_order_is_the_rollout_s_however_they_come_back():
    assert samples(lambda samples, groups: samples[::-1])[0] == Recipe().samples(rollout(), 0)[0]


def test_a_cleared_mask_takes_a_sample_out_of_the_loss_and_leaves_it_in_its_group():
    def process(samples, groups):
        assert [group.task.id for group in groups] == ["a", "b"]
        return [replace(s, loss_mask=(False,) * len(s.tokens)) if s.trajectory == "a/0" else s for s in samples]

    out, metrics = samples(process)
    assert flatten(metrics)["process/masked_tokens"] == 3 and flatten(metrics)["process/left_out"] == 0
    found = credit(out)
    plain = credit(Recipe().samples(rollout(), 0)[0])
    assert found["a/0"] == 0.0 and plain["a/0"] > 0
    assert {k: v for k, v in found.items() if k != "a/0"} == {k: v for k, v in plain.items() if k != "a/0"}


def test_what_it_leaves_out_leaves_its_group_s_statistics_too():
    out, metrics = samples(lambda samples, groups: [s for s in samples if s.trajectory != "a/0"])
    assert flatten(metrics) == {**flatten(metrics), "process/left_out": 1, "process/masked_tokens": 3}
    found = credit(out)
    mean, std = np.mean([0.0, 0.25]), np.std([0.0, 0.25], ddof=1)
    assert found["a/0"] == 0.0
    assert found["a/1"] == pytest.approx((0.0 - mean) / (std + 1e-6), rel=1e-6)


def test_changed_rewards_are_what_credit_sees():
    out, _ = samples(lambda samples, groups: [replace(s, reward=np.float32(10 * s.reward)) for s in samples])
    plain = credit(Recipe().samples(rollout(), 0)[0])
    assert credit(out) == pytest.approx(plain, rel=1e-4)  # the scale of the rewards is divided out
    shifted, _ = samples(lambda samples, groups: [replace(s, reward=s.reward**2) for s in samples])
    scores = np.array([1.0, 0.0, 0.0625])
    assert credit(shifted)["a/2"] == pytest.approx((0.0625 - scores.mean()) / (scores.std(ddof=1) + 1e-6), rel=1e-5)


def credit(samples):
    """GRPO's advantage of each trajectory's trained tokens; 0 where none trains."""
    batch, _ = build_algorithm(GRPOConfig(), StepPlan(1, 3)).assign_credit(batch_of(samples))
    found = {}
    for sample, row, mask in zip(samples, batch.ragged(batch.advantages), batch.ragged(batch.loss_mask), strict=True):
        trained = {a for a, m in zip(row, mask, strict=True) if m}
        found[sample.trajectory] = trained.pop() if trained else found.get(sample.trajectory, 0.0)
    return found


def test_old_tokens_are_masked_after_it_whatever_it_says():
    old = [Group(Task("a", "p"), tuple(trajectory(f"a/{k}", [turn(version=k, restart=True)]) for k in range(3)))]
    seen = []

    def process(samples, groups):
        seen.extend(sum(s.loss_mask) for s in samples)
        return samples

    out, metrics = make(process, max_staleness=1).samples(old, 2)
    assert seen == [3, 3, 3] and [sum(s.loss_mask) for s in out] == [0, 3, 3]
    assert flatten(metrics)["staleness/masked_tokens"] == 3 and flatten(metrics)["process/masked_tokens"] == 0


def change(index, **fields):
    def process(samples, groups):
        samples[index] = replace(samples[index], **fields)
        return samples

    return process


@pytest.mark.parametrize(
    ("process", "words"),
    [
        (lambda samples, groups: None, "returned None; return a list of the samples"),
        (lambda samples, groups: [*samples[:-1], "x"], "return a list of the samples"),
        (lambda samples, groups: [*samples, samples[0]], "returned the sample 0 of trajectory 'a/0' twice"),
        (lambda samples, groups: [replace(samples[0], trajectory="c/7")], "trajectory 'c/7' (order 0), which the rollout has not"),
        (change(0, tokens=(1, 2, 5, 5, 6)), "changed tokens of the sample 0 of trajectory 'a/0'; it may change"),
        (change(0, versions=(-1, -1, 1, 1, 1)), "changed versions of"),
        (change(0, logprobs=(0.0, 0.0, 0.0, 0.0, 0.0)), "changed logprobs of"),
        (change(1, temperature=0.5), "changed temperature of"),
        (change(1, group="b"), "changed group of"),
        (change(1, loss_mask=(False, True, True, True, True)), "it may only take tokens out"),
        (change(6, valid=True), "made the sample 0 of trajectory 'b/2' valid; its trajectory failed"),
        (change(0, reward=float("nan")), "the reward nan; it must be finite"),
        (change(0, reward="1"), "the reward '1'; it must be finite"),
        (change(0, token_rewards=(0.0, 0.0, float("inf"), 0.0, 0.0)), "it must be finite"),
        (change(0, baseline=0.5), "gave or took the baseline"),
        (change(4, reward=0.5), "trajectory 'b/1' with different reward"),
        (lambda samples, groups: samples[:5], "trajectory 'b/1' with different valid; return all of them alike"),
    ],
)
def test_what_was_not_sampled_is_refused(process, words):
    with pytest.raises(HookFailed) as fault:
        samples(process)
    assert str(fault.value).startswith("batch.process = 'my_code:process' ")
    assert words in str(fault.value)


def test_what_it_raises_names_the_key_the_function_and_the_line(tmp_path):
    (tmp_path / "code.py").write_text("def helper():\n    return {}['x']\n\ndef process(samples, groups):\n    return helper()\n")
    hook = Hook.of("batch.process", f"{tmp_path}/code.py:process", ["samples", "groups"])
    with pytest.raises(HookFailed, match=r"code.py:process' raised KeyError: 'x' \(at .*code.py:2 in helper\)"):
        Recipe(process=hook).samples(rollout(), 0)


def test_an_impossible_field_is_the_function_s_own_error(tmp_path):
    with pytest.raises(HookFailed, match="raised ValueError: a sample's per-token fields differ in length"):
        samples(change(0, loss_mask=(False,)))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def process(samples): ...", "batch.process '{}' cannot be called as f(samples, groups)"),
        ("async def process(samples, groups): ...", "batch.process '{}' is an async function; write it with plain `def`"),
        ("process = 3", "is a int, not a function"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused_by_key(tmp_path, code, words):
    (tmp_path / "code.py").write_text(code + "\n")
    reference = f"{tmp_path}/code.py:process"
    with pytest.raises(ConfigError) as fault:
        Hook.of("batch.process", reference, ["samples", "groups"])
    assert words.format(reference) in str(fault.value)
