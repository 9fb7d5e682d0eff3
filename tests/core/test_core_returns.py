from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.core_batches import batch, sample
from whet.core.returns import discounted_returns, gae, rewards_on_tokens, scores, time_steps, turn_returns
from whet.types import Origin, Sample

MASKS = st.lists(st.text(".#", min_size=1, max_size=7).map(lambda tail: "." + tail), min_size=1, max_size=4)
SHARE = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def tool_sample(mask: str, *, trajectory="t", order=0, reward=0.0) -> Sample:
    """The first token is the prompt; after it `#` is the model's and `.` the environment's."""
    plain = sample(mask, trajectory=trajectory, order=order, reward=reward)
    origin = (Origin.PROMPT, *(Origin.MODEL if c == "#" else Origin.ENVIRONMENT for c in mask[1:]))
    return Sample(**{name: getattr(plain, name) for name in plain.__dataclass_fields__} | {"origin": origin})


def random_columns(b, seed, num):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, b.num_tokens, generator=generator, dtype=torch.float32)


def by_hand(rewards, values, gamma, lam, beyond=0.0):
    """GAE over a list of steps."""
    advantages, ahead, running = [], beyond, 0.0
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        running = r + gamma * ahead - v + gamma * lam * running
        ahead = v
        advantages.append(running)
    return advantages[::-1]


@given(MASKS, SHARE, SHARE, st.sampled_from(["actions", "all"]), st.booleans(), st.integers(0, 99))
def test_gae_is_its_definition_over_the_steps(masks, gamma, lam, over, cut, seed):
    b = batch(*(tool_sample(mask, trajectory=str(i)) for i, mask in enumerate(masks)))
    rewards, values = random_columns(b, seed, 2)
    steps = time_steps(b, over)
    beyond = torch.randn(b.num_samples) if cut else torch.zeros(b.num_samples)
    advantages, returns = gae(b.with_(values=values), rewards, steps, gamma=gamma, lam=lam, beyond=beyond if cut else None)
    for start, length, end in zip(b.starts.tolist(), b.lengths.tolist(), beyond.tolist(), strict=True):
        places = [t for t in range(start, start + length) if steps[t]]
        expected = by_hand([float(rewards[t]) for t in places], [float(values[t]) for t in places], gamma, lam, end)
        assert advantages[places].tolist() == pytest.approx(expected, abs=1e-9)
        assert returns[places].tolist() == pytest.approx([a + float(values[t]) for a, t in zip(expected, places, strict=True)], abs=1e-9)


@given(MASKS, SHARE, st.integers(0, 99))
def test_a_token_that_is_no_step_has_what_follows_it(masks, gamma, seed):
    b = batch(*(tool_sample(mask, trajectory=str(i)) for i, mask in enumerate(masks)))
    rewards, values = random_columns(b, seed, 2)
    advantages, _ = gae(b.with_(values=values), rewards, b.loss_mask, gamma=gamma, lam=0.9)
    returns = discounted_returns(b, rewards, b.loss_mask, gamma)
    ends = set((b.starts + b.lengths - 1).tolist())
    for t in (~b.loss_mask).nonzero().squeeze(-1).tolist():
        for column in (advantages, returns):
            assert float(column[t]) == (0.0 if t in ends else float(column[t + 1]))


def test_with_lambda_1_gae_is_the_return_less_the_value_and_gamma_counts_actions():
    b = batch(tool_sample(".##..#", reward=8.0)).with_(values=torch.tensor([0.0, 1.0, 2.0, 9.0, 9.0, 3.0]))
    advantages, returns = gae(b, rewards_on_tokens(b), b.loss_mask, gamma=0.5)
    assert returns[b.loss_mask].tolist() == [2.0, 4.0, 8.0]
    assert advantages[b.loss_mask].tolist() == [1.0, 2.0, 5.0]
    _, everything = gae(b, rewards_on_tokens(b), time_steps(b, "all"), gamma=0.5)
    assert everything[1:].tolist() == [0.5, 1.0, 2.0, 4.0, 8.0]


def test_what_a_cut_trajectory_goes_on_with_is_that_of_its_last_sample_and_reaches_its_last_action():
    """The last action is followed by the environment's tokens, which are no steps: the value beyond them passes through."""
    samples = (tool_sample(".#..", order=1), sample(".#", trajectory="other", group="h"), tool_sample(".#", order=0))
    b = batch(*samples)
    beyond, nothing = torch.tensor([10.0, 0.0, 99.0]), torch.zeros(b.num_tokens)
    advantages, _ = gae(b.with_(values=nothing), nothing, b.loss_mask, gamma=0.5, beyond=beyond)
    assert advantages[b.loss_mask].tolist() == [5.0, 0.0, 2.5]


def test_gae_without_values_says_so():
    b = batch(sample(".#"))
    with pytest.raises(ValueError, match="this batch has none"):
        gae(b, torch.zeros(2), b.loss_mask)


@given(st.integers(0, 99), SHARE, SHARE)
def test_credit_flows_across_the_samples_of_a_trajectory(seed, gamma, lam):
    whole = batch(tool_sample(".##.#", reward=2.0))
    parts = batch(
        tool_sample(".#", order=1, reward=2.0), sample(".#", trajectory="other", group="h"), tool_sample(".##", order=0, reward=2.0)
    )
    values = random_columns(whole, seed, 1)[0]
    first, last = values[1:3], values[4:]
    split = torch.cat([torch.zeros(1), last, torch.zeros(3), first])
    one, _ = gae(whole.with_(values=values), rewards_on_tokens(whole), whole.loss_mask, gamma=gamma, lam=lam)
    two, _ = gae(parts.with_(values=split), rewards_on_tokens(parts), parts.loss_mask, gamma=gamma, lam=lam)
    assert [*two[5:7].tolist(), two[1].item()] == pytest.approx(one[whole.loss_mask].tolist(), abs=1e-9)


def test_the_reward_stands_on_the_last_action_or_the_last_token():
    other = (tool_sample(".#", trajectory="u", reward=5.0), tool_sample("..", trajectory="v", reward=7.0))
    b = batch(tool_sample(".#.#.", reward=3.0), *other)
    assert rewards_on_tokens(b).tolist() == [0, 0, 0, 3, 0, 0, 5, 0, 0]
    assert rewards_on_tokens(b, "last_token").tolist() == [0, 0, 0, 0, 3, 0, 5, 0, 7]
    extra = torch.tensor([0, 0.5, 0, 0, 0, 0, -1.0, 0, 0])
    assert rewards_on_tokens(b.with_(token_rewards=extra)).tolist() == [0, 0.5, 0, 3, 0, 0, 4, 0, 0]


def test_scores_add_the_token_rewards_of_the_whole_trajectory():
    b = batch(sample(".#", reward=1.0), sample(".#", order=1, reward=1.0), sample(".#", trajectory="u", reward=2.0))
    assert scores(b).tolist() == [1.0, 1.0, 2.0]
    assert scores(b.with_(token_rewards=torch.tensor([0, 0.25, 0, 0.5, 0, -1.0]))).tolist() == [1.75, 1.75, 1.0]


def test_a_rewritten_history_is_no_step():
    """The second sample repeats what the environment said before; its steps begin with its own first action."""
    b = batch(tool_sample(".#"), tool_sample("..#.", order=1))
    assert time_steps(b, "all").tolist() == [False, True, False, False, True, True]


@given(MASKS, SHARE, st.integers(0, 99))
def test_discounted_returns_are_sums_of_later_rewards(masks, gamma, seed):
    b = batch(*(tool_sample(mask, trajectory=str(i)) for i, mask in enumerate(masks)))
    (rewards,) = random_columns(b, seed, 1)
    found = discounted_returns(b, rewards.double(), b.loss_mask, gamma)
    for start, length in zip(b.starts.tolist(), b.lengths.tolist(), strict=True):
        places = [t for t in range(start, start + length) if b.loss_mask[t]]
        for i, t in enumerate(places):
            expected = sum(gamma**j * float(rewards[u]) for j, u in enumerate(places[i:]))
            assert float(found[t]) == pytest.approx(expected, abs=1e-9)


def test_turns_are_credited_by_themselves():
    b = batch(tool_sample(".##.##", reward=1.0))
    assert turn_returns(b, rewards_on_tokens(b), 0.5)[b.loss_mask].tolist() == [0.0, 0.0, 0.5, 1.0]
    assert discounted_returns(b, rewards_on_tokens(b), b.loss_mask, 0.5)[b.loss_mask].tolist() == [0.125, 0.25, 0.5, 1.0]
