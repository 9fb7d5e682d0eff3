"""Every algorithm's advantages on random rollouts, against a few lines of plain Python in float64 for each."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.algo.algo_batches import rollout
from whet.algo.base import StepPlan
from whet.algo.config import AlgorithmConfig
from whet.algo.table import ALGORITHMS, build_algorithm
from whet.core.batch import PER_SAMPLE
from whet.types import Origin

pytestmark = pytest.mark.long

MASKS = st.text("#.", min_size=1, max_size=5).map(lambda tail: "." + tail)
TRAJECTORIES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 0.25, 1.0, 2.0]), st.sampled_from([True, True, True, False]),
              st.lists(MASKS, min_size=1, max_size=2)),
    min_size=2, max_size=8,
)  # fmt: skip


@dataclass
class Story:
    """One trajectory: its tokens one after another, whatever samples they are in."""

    group: str
    reward: float
    valid: bool
    masks: list[str]
    columns: dict[str, list[float]]
    """Per-token columns, and those per sample once for each token."""
    paid: list[float]
    """Rewards of single tokens, less their KL where that is a part of the reward."""

    @property
    def score(self) -> float:
        return self.reward + math.fsum(self.paid)

    @property
    def mask(self) -> str:
        return "".join(self.masks)

    @property
    def actions(self) -> list[int]:
        return [t for t, c in enumerate(self.mask) if c == "#"]


def alike(story: Story, stories: list[Story]) -> list[Story]:
    """Who it is compared with: the valid trajectories of its group, itself included."""
    return [other for other in stories if other.group == story.group and other.valid]


def per_trajectory(formula):
    """The same advantage for all of a trajectory's tokens, from its siblings' rewards."""

    def advantages(story: Story, stories: list[Story]) -> list[float]:
        return [formula(story, [other.score for other in alike(story, stories)], stories)] * len(story.mask)

    return advantages


def to_go(story: Story, rewards: list[float], steps: list[int]) -> list[float]:
    """The sum of the rewards at the steps from each token on."""
    return [math.fsum(rewards[s] for s in steps if s >= t) for t in range(len(rewards))]


def rewards_with_last_at(story: Story, places: list[int]) -> list[float]:
    """Of each token: what it was paid, and the trajectory's reward on the last of the places."""
    return [paid + story.reward * (t == max(places, default=-1)) for t, paid in enumerate(story.paid)]


def grpo(story, rewards, stories):
    return (story.score - fmean(rewards)) / (stdev(rewards) + 1e-6)


def opo(story, rewards, stories):
    lengths = [len(other.actions) for other in alike(story, stories)]
    weighted = math.fsum(n * r for n, r in zip(lengths, rewards, strict=True))
    return story.score - (weighted / sum(lengths) if sum(lengths) else 0.0)


def gpg(story, rewards, stories):
    everyone = [other.score for other in stories if other.valid]
    return len(everyone) / max(sum(r != 0 for r in everyone), 1) * (story.score - fmean(rewards))


def passk(story, rewards, stories):
    first, second = sorted(rewards, reverse=True)[:2]
    return (first - second) / (stdev(rewards) + 1e-6) if story.score == first else 0.0


def returns(story, stories):
    return to_go(story, rewards_with_last_at(story, story.actions), story.actions)


def turns(story, stories):
    """A turn's own rewards, discounted by 0.9."""
    rewards, out = rewards_with_last_at(story, story.actions), [0.0] * len(story.mask)
    for t in reversed(story.actions):
        out[t] = rewards[t] + (0.9 * out[t + 1] if story.mask[t + 1 : t + 2] == "#" else 0.0)
    return out


def remax(story, stories):
    return [g - b for g, b in zip(returns(story, stories), story.columns["baseline"], strict=True)]


def energy(story: Story, places: list[int]) -> float:
    old, squared = story.columns["old_logprobs"], story.columns["squared_probs"]
    return math.fsum(1 - 2 * math.exp(old[t]) + squared[t] for t in places)


def weighted_mean(there: list[Story], weights: list[float]) -> float:
    return math.fsum(w * other.reward for w, other in zip(weights, there, strict=True)) / (math.fsum(weights) + 1e-8)


def otb(story, stories):
    """B at the n-th action: the mean return there, weighted by the gradient's energy up to it."""
    out = [0.0] * len(story.mask)
    for n, t in enumerate(story.actions):
        there = [other for other in alike(story, stories) if len(other.actions) > n]
        mean = weighted_mean(there, [energy(other, other.actions[: n + 1]) for other in there])
        out[t] = story.reward - (mean if len(there) > 1 else 0.0)
    return out


def otb_by_position(story, stories):
    """The same over the trajectories with an action at the same place; none beyond as many tokens as the others have actions."""
    out = [0.0] * len(story.mask)
    most = max((len(other.actions) for other in alike(story, stories) if other is not story), default=0)
    for t in story.actions:
        there = [other for other in alike(story, stories) if t in other.actions]
        mean = weighted_mean(there, [energy(other, [u for u in other.actions if u <= t]) for other in there])
        out[t] = story.reward - (0.0 if len(story.actions) > most and t >= most else mean)
    return out


def ppo(over: str, gamma: float, lam: float, bootstrap: bool = False, last_token: bool = False):
    def advantages(story: Story, stories: list[Story]) -> list[float]:
        steps = story.actions if over == "actions" else every_step(story)
        rewards, values = rewards_with_last_at(story, steps if last_token else story.actions), story.columns["values"]
        cut = bootstrap and story.columns["truncated"][-1]
        found, carried, ahead = [0.0] * len(values), 0.0, story.columns["scores"][-1] if cut else 0.0
        for t in reversed(range(len(values))):
            if t in steps:
                carried = rewards[t] + gamma * ahead - values[t] + gamma * lam * carried
                ahead = values[t]
            found[t] = carried
        return found

    return advantages


def every_step(story: Story) -> list[int]:
    """The environment's tokens, too; those that open a later sample are a rewritten history."""
    out, start = [], 0
    for order, mask in enumerate(story.masks):
        first = 0 if order == 0 else mask.find("#") if "#" in mask else len(mask)
        out += range(start + first, start + len(mask))
        start += len(mask)
    return out


def distilled(inner, coef: float):
    def advantages(story: Story, stories: list[Story]) -> list[float]:
        old, teacher = story.columns["old_logprobs"], story.columns["teacher_logprobs"]
        return [a - coef * (o - h) for a, o, h in zip(inner(story, stories), old, teacher, strict=True)]

    return advantages


GRPO = per_trajectory(grpo)
LESS_MEAN = per_trajectory(lambda story, rewards, stories: story.score - fmean(rewards))
RLOO = per_trajectory(lambda story, rewards, stories: story.score - (math.fsum(rewards) - story.score) / (len(rewards) - 1))
MAXRL = per_trajectory(lambda story, rewards, stories: story.score / fmean(rewards) - 1 if any(rewards) else 0.0)
CASES = {
    "grpo": (GRPO, {}),
    "dr_grpo": (LESS_MEAN, {}),
    "gspo": (GRPO, {}),
    "cispo": (GRPO, {}),
    "sapo": (GRPO, {}),
    "gmpo": (GRPO, {}),
    "grpo_passk": (per_trajectory(passk), {}),
    "rloo": (RLOO, {}),
    "opo": (per_trajectory(opo), {}),
    "gpg": (per_trajectory(gpg), {}),
    "maxrl": (MAXRL, {}),
    "otb": (otb, {}),
    "remax": (remax, {}),
    "reinforce_plus_plus": (returns, {"whiten": True}),
    "reinforce_plus_plus, plain": (returns, {"whiten": False}),
    "reinforce_plus_plus_baseline": (LESS_MEAN, {"whiten": True}),
    "ppo": (ppo("actions", 1.0, 1.0), {"whiten": True}),
    "ppo, actions": (ppo("actions", 0.9, 0.8), {"whiten": False, "gamma": 0.9, "lam": 0.8}),
    "ppo, all": (ppo("all", 0.9, 0.8), {"whiten": False, "gamma": 0.9, "lam": 0.8, "credit_over": "all"}),
    "ppo, cut": (ppo("actions", 0.9, 0.8, True), {"whiten": False, "gamma": 0.9, "lam": 0.8, "bootstrap_truncated": True}),
    "ppo, cut, all": (
        ppo("all", 0.9, 0.8, True),
        {"whiten": False, "gamma": 0.9, "lam": 0.8, "credit_over": "all", "bootstrap_truncated": True},
    ),
    "ppo, last token": (
        ppo("all", 0.9, 0.8, last_token=True),
        {"whiten": False, "gamma": 0.9, "lam": 0.8, "credit_over": "all", "reward_at": "last_token"},
    ),
    "reinforce_plus_plus, turns": (turns, {"whiten": False, "gamma": 0.9, "credit_over": "turns"}),
    "otb, position": (otb_by_position, {"align": "position"}),
    "grpo, token rewards": (GRPO, {}),
    "opo, token rewards": (per_trajectory(opo), {}),
    "gpg, token rewards": (per_trajectory(gpg), {}),
    "grpo_passk, token rewards": (per_trajectory(passk), {}),
    "remax, token rewards": (remax, {}),
    "reinforce_plus_plus, turns, token rewards": (turns, {"whiten": False, "gamma": 0.9, "credit_over": "turns"}),
    "ppo, all, token rewards": (ppo("all", 0.9, 0.8), {"whiten": False, "gamma": 0.9, "lam": 0.8, "credit_over": "all"}),
    "rloo, KL": (RLOO, {"kl_reward": {"coef": 0.5}}),
    "dr_grpo, KL, token rewards": (LESS_MEAN, {"kl_reward": {"coef": 0.5}}),
    "reinforce_plus_plus, KL": (returns, {"whiten": True, "kl_reward": {"coef": 0.5}}),
    "ppo, KL": (ppo("actions", 0.9, 0.8), {"whiten": False, "gamma": 0.9, "lam": 0.8, "kl_reward": {"coef": 0.5}}),
    "rloo, distilled": (distilled(RLOO, 0.5), {"distill_coef": 0.5}),
    "reinforce_plus_plus, distilled": (distilled(returns, 0.5), {"distill_coef": 0.5, "whiten": True}),
}
ALONE = {"remax", "reinforce_plus_plus", "ppo"}
"""Need no siblings."""


def test_every_algorithm_has_a_reference():
    assert {name.split(",")[0] for name in CASES} == set(ALGORITHMS)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=40, deadline=None)
@given(trajectories=TRAJECTORIES, seed=st.integers(0, 1000))
def test_advantages_are_the_reference_and_0_where_nothing_trains(case, trajectories, seed):
    name = case.split(",")[0]
    reference, changes = CASES[case]
    batch = rollout(*trajectories)
    columns = random_columns(batch, seed)
    algorithm = build_algorithm(TypeAdapter(AlgorithmConfig).validate_python({"name": name, **changes}), StepPlan(2, max_tokens=16))
    given_too = ({"truncated", "scores"} if name == "ppo" else set()) | ({"token_rewards"} if "token rewards" in case else set())
    batch = batch.with_(**{key: column for key, column in columns.items() if key in algorithm.needs | given_too})
    kl_coef = changes.get("kl_reward", {"coef": 0.0})["coef"]
    stories = stories_of(trajectories, batch, columns, kl_coef, "token rewards" in case)
    usable = [s.valid and (name in ALONE or len(alike(s, stories)) > 1) for s in stories]
    expected = [reference(s, stories) if good else [0.0] * len(s.mask) for s, good in zip(stories, usable, strict=True)]
    mask = [c == "#" and good for s, good in zip(stories, usable, strict=True) for c in s.mask]
    flat = [a for row in expected for a in row]
    trained = [a for a, m in zip(flat, mask, strict=True) if m]
    if changes.get("whiten"):
        assume(len(trained) > 1 and stdev(trained) > 1e-2)
        flat = [(a - fmean(trained)) / math.sqrt(stdev(trained) ** 2 + 1e-8) for a in flat]

    found, _ = algorithm.assign_credit(batch)
    assert found.loss_mask.tolist() == mask
    assert found.advantages[~found.loss_mask].eq(0).all()
    assert found.advantages.tolist() == pytest.approx([a * m for a, m in zip(flat, mask, strict=True)], rel=1e-5, abs=1e-5)
    if changes.get("whiten"):
        actions = found.advantages[found.loss_mask].tolist()
        assert fmean(actions) == pytest.approx(0, abs=1e-5) and stdev(actions) == pytest.approx(1, rel=1e-3)


def random_columns(batch, seed: int) -> dict[str, torch.Tensor]:
    """Log-probs are of distributions over two tokens, so that the sums of squares fit them."""
    generator = torch.Generator().manual_seed(seed)
    chance = 0.05 + 0.9 * torch.rand(batch.num_tokens, generator=generator)
    return {
        "old_logprobs": chance.log(),
        "squared_probs": chance.square() + (1 - chance).square(),
        "teacher_logprobs": -torch.rand(batch.num_tokens, generator=generator),
        "ref_logprobs": -torch.rand(batch.num_tokens, generator=generator),
        "token_rewards": torch.randint(3, (batch.num_tokens,), generator=generator) / 4 * batch.valid[batch.sample_of_token],
        "values": torch.randn(batch.num_tokens, generator=generator),
        "baseline": torch.rand(batch.num_samples, generator=generator).double(),
        "scores": torch.randn(batch.num_tokens, generator=generator),
        "truncated": (torch.rand(int(batch.trajectory.max()) + 1, generator=generator) < 0.5)[batch.trajectory],
    }


def stories_of(trajectories, batch, columns: dict[str, torch.Tensor], kl_coef: float, pays_tokens: bool) -> list[Story]:
    per_token = {
        name: (column[batch.sample_of_token] if name in PER_SAMPLE else column).tolist() for name, column in columns.items()
    }
    assert set(batch.origin.tolist()) <= {int(Origin.MODEL), int(Origin.ENVIRONMENT)}
    out, start = [], 0
    for group, reward, valid, masks in trajectories:
        stop = start + sum(map(len, masks))
        mine = {name: column[start:stop] for name, column in per_token.items()}
        rows = zip("".join(masks), mine["token_rewards"], mine["old_logprobs"], mine["ref_logprobs"], strict=True)
        paid = [given * pays_tokens - kl_coef * (old - ref) * (c == "#") for c, given, old, ref in rows]
        out.append(Story(group, reward, valid, masks, mine, paid))
        start = stop
    return out
