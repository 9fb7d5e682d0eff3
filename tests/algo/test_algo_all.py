"""What holds for every algorithm of the table: masked tokens get nothing, and no order and no cut changes a gradient."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tests.algo.algo_batches import outputs, rollout
from whet.algo.base import Need, StepPlan
from whet.algo.config import AlgorithmConfig, DrGRPOConfig, GRPOConfig
from whet.algo.table import ALGORITHMS, build_algorithm
from whet.core.batch import TokenOutputs, TrainBatch
from whet.observe.metrics import flatten, merge_metrics

ROLLOUT = [
    ("a", 1.0, True, [".##", ".#"]),
    ("a", 0.0, True, [".#.##"]),
    ("a", 9.0, False, [".#"]),
    ("b", 2.0, True, [".##"]),
    ("b", 0.0, True, [".##.#"]),
    ("b", 1.0, True, [".#"]),
    ("c", 1.0, True, [".#"]),
]
PLAN = StepPlan(2, max_tokens=8)


def annotated(batch: TrainBatch, needs, seed=0) -> TrainBatch:
    """Every column that an algorithm may ask for, at random."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(6, batch.num_tokens, generator=generator)
    columns = {
        "old_logprobs": -noise[0].abs() * batch.loss_mask,
        "ref_logprobs": -noise[1].abs() * batch.loss_mask,
        "teacher_logprobs": -noise[2].abs() * batch.loss_mask,
        "values": noise[3],
        "squared_probs": noise[4].sigmoid(),
        "baseline": noise[5][: batch.num_samples].double(),
    }
    return batch.with_(**{need.value: columns[need.value] for need in needs})


def algorithm_of(name, **settings):
    config = TypeAdapter(AlgorithmConfig).validate_python({"name": name, **settings})
    return build_algorithm(config, PLAN)


def credited(algorithm, trajectories=ROLLOUT):
    return algorithm.assign_credit(annotated(rollout(*trajectories), algorithm.needs))


def near(batch: TrainBatch, seed=5) -> TokenOutputs:
    """Log-probs close to the old ones, so that clips do and do not take effect."""
    shift = 0.3 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    logprobs = ((batch.old_logprobs + shift) * batch.loss_mask).detach().requires_grad_(True)
    return TokenOutputs(logprobs, outputs(batch, seed).entropy)


VARIANTS = [(name, {}) for name in ALGORITHMS] + [
    ("grpo", {"entropy_coef": 0.1, "kl_coef": 0.2, "kl_unbiased": True, "clip_dual": 3.0}),
    ("grpo", {"loss": {"name": "clip_cov", "covariance_share": 0.4, "covariance_bounds": (-9.0, 9.0)}}),
    ("grpo", {"loss": {"name": "kl_cov", "covariance_share": 0.4}}),
    ("rloo", {"mask_delta": 0.01, "whiten": True, "distill_coef": 0.5}),
    ("gspo", {"loss": {"name": "sequence", "sequence_gradient": "sequence"}, "clip_low": 0.2, "clip_high": 0.2}),
    ("gmpo", {"correction": {"weights": "token"}}),
    ("grpo", {"correction": {"weights": "sequence", "normalize": True, "veto": 0.01, "reject": [{"statistic": "mean_k3", "high": 0.5}]}}),
    ("grpo", {"correction": {"weights": "geometric", "bound": "mask", "rejected": "mask"}}),
    ("ppo", {"kl_reward": {"coef": 0.1, "target": 0.05, "horizon": 50}, "gamma": 0.9, "lam": 0.8, "credit_over": "all"}),
    ("reinforce_plus_plus", {"credit_over": "turns", "reducer": "group_mean"}),
]


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
def test_only_usable_trained_tokens_get_credit(name, settings):
    before = rollout(*ROLLOUT)
    batch, _ = credited(algorithm_of(name, **settings))
    assert not batch.advantages[~batch.loss_mask].any() and not batch.returns[~batch.loss_mask].any()
    assert not (batch.loss_mask & ~before.loss_mask).any()
    assert batch.advantages.dtype == batch.returns.dtype == torch.float32 and bool(batch.advantages.isfinite().all())
    alone, failed = 7, 3
    assert not batch.valid[failed]
    compares = name not in ("ppo", "remax", "reinforce_plus_plus")
    assert bool(batch.valid[alone]) == (not compares)
    assert batch.advantages[batch.loss_mask].abs().sum() > 0


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@settings_of_hypothesis(max_examples=5)
@given(seed=st.integers(0, 30))
def test_no_order_and_no_cut_of_a_step_changes_its_gradient(name, settings, seed):
    algorithm = algorithm_of(name, **settings)
    batch, _ = credited(algorithm)
    step = algorithm.prepare(batch.with_(weights=algorithm.reducer(batch)))
    out = near(step)
    whole = algorithm.loss(step, out)
    loss = (step.weights * whole.terms).sum()
    (expected,) = torch.autograd.grad(loss, out.logprobs)
    order = torch.randperm(batch.num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    total, found, metrics = 0.0, torch.zeros_like(expected), {}
    for part in (order[:2], order[2:5], order[5:]):
        places = torch.cat([torch.arange(step.starts[i], step.starts[i] + step.lengths[i]) for i in part])
        piece = step.select(part)
        mine = algorithm.loss(piece, TokenOutputs(out.logprobs[places], out.entropy[places]))
        value = (piece.weights * mine.terms).sum()
        total += float(value.detach())
        found = found + torch.autograd.grad(value, out.logprobs)[0]
        metrics = merge_metrics(metrics, mine.metrics)
    assert total == pytest.approx(float(loss.detach()), rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert flatten(metrics) == pytest.approx(flatten(whole.metrics), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(("name", "settings"), VARIANTS)
@settings_of_hypothesis(max_examples=5, deadline=None)
@given(seed=st.integers(0, 30))
def test_no_order_of_a_rollout_changes_credit_or_gradient(name, settings, seed):
    before = annotated(rollout(*ROLLOUT), algorithm_of(name, **settings).needs)
    shift = near(before).logprobs.detach() if before.old_logprobs is not None else outputs(before).logprobs.detach()

    def learn(batch, logprobs):
        algorithm = algorithm_of(name, **settings)
        found, metrics = algorithm.assign_credit(batch)
        step = algorithm.prepare(found.with_(weights=algorithm.reducer(found)))
        out = TokenOutputs(logprobs.clone().requires_grad_(True), -logprobs)
        (step.weights * algorithm.loss(step, out).terms).sum().backward()
        columns = {"advantages": found.advantages, "returns": found.returns, "gradient": out.logprobs.grad}
        return {key: found.ragged(column) for key, column in columns.items()}, flatten(metrics)

    order = torch.randperm(before.num_samples, generator=torch.Generator().manual_seed(seed)).tolist()
    places = torch.cat([torch.arange(before.starts[i], before.starts[i] + before.lengths[i]) for i in order])
    expected, metrics = learn(before, shift)
    found, found_metrics = learn(before.select(order), shift[places])
    for key, rows in expected.items():
        assert [x for row in found[key] for x in row] == pytest.approx([x for i in order for x in rows[i]], rel=1e-4, abs=1e-6), key
    assert found_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


def per_sample(batch):
    """The one advantage of each usable sample."""
    pairs = zip(batch.ragged(batch.advantages), batch.ragged(batch.loss_mask), strict=True)
    rows = [[a for a, m in zip(*pair, strict=True) if m] for pair in pairs]
    assert all(len(set(row)) <= 1 for row in rows)
    return [row[0] if row else None for row in rows]


def test_advantages_by_hand():
    """Group a: 1 and 0; group b: 2, 0 and 1."""
    half = 0.5 / (math.sqrt(0.5) + 1e-6)
    one = 1 / (1 + 1e-6)
    expected = {
        "grpo": [half, half, -half, None, one, -one, 0.0, None],
        "dr_grpo": [0.5, 0.5, -0.5, None, 1.0, -1.0, 0.0, None],
        "rloo": [1.0, 1.0, -1.0, None, 1.5, -1.5, 0.0, None],
        "gpg": [0.75, 0.75, -0.75, None, 1.5, -1.5, 0.0, None],
        "maxrl": [1.0, 1.0, -1.0, None, 1.0, -1.0, 0.0, None],
        "opo": [0.5, 0.5, -0.5, None, 2 - 5 / 6, -5 / 6, 1 - 5 / 6, None],
        "grpo_passk": [2 * half, 2 * half, 0.0, None, one, 0.0, 0.0, None],
    }
    for name, wanted in expected.items():
        found = per_sample(credited(algorithm_of(name))[0])
        assert [a is None for a in found] == [w is None for w in wanted], name
        assert [a for a in found if a is not None] == pytest.approx([w for w in wanted if w is not None], rel=1e-5), name


def test_the_baseline_form_of_reinforce_plus_plus_is_whitened_over_tokens():
    batch, _ = credited(algorithm_of("reinforce_plus_plus_baseline"))
    found = batch.advantages[batch.loss_mask].tolist()
    assert statistics.fmean(found) == pytest.approx(0, abs=1e-6) and statistics.stdev(found) == pytest.approx(1, rel=1e-4)


def test_remax_takes_off_the_greedy_reward_and_misses_it():
    algorithm = algorithm_of("remax")
    assert algorithm.needs == {Need.BASELINE, Need.OLD_LOGPROBS}
    trajectories = [("a", 1.0, True, [".#.#"]), ("a", 0.0, True, [".#"])]
    batch = rollout(*trajectories)
    found, _ = algorithm.assign_credit(batch.with_(baseline=torch.tensor([0.25, 0.25]).double()))
    assert found.ragged(found.advantages) == [[0, 0.75, 0, 0.75], [0, -0.25]]
    with pytest.raises(ValueError, match="brought no baseline"):
        algorithm.assign_credit(batch)


def test_ppo_learns_from_a_critic_whose_values_it_asks_for():
    algorithm = algorithm_of("ppo", whiten=False, gamma=0.5)
    assert Need.VALUES in algorithm.needs
    batch = rollout(("a", 4.0, True, [".#.#"])).with_(values=torch.tensor([9.0, 1.0, 9.0, 2.0]))
    found, _ = algorithm.assign_credit(batch)
    assert found.returns.tolist() == [0, 2, 0, 4] and found.advantages.tolist() == [0, 1, 0, 2]


def test_a_reward_on_the_last_token_stands_on_a_time_step():
    with pytest.raises(ValueError, match=r"reward_at=last_token with credit_over=actions loses the reward .* set credit_over=all"):
        algorithm_of("ppo", reward_at="last_token")
    algorithm = algorithm_of(
        "ppo",
        whiten=False,
        reward_at="last_token",
        credit_over="all",
        correction={"rejected": "mask", "reject": [{"statistic": "token_k2", "high": 1.0}]},
    )
    # The second sample's only trained token is rejected: what is left of the trajectory ends with the first sample.
    batch = rollout(("a", 4.0, True, [".#.", "..#."])).with_(values=torch.zeros(7))
    found, _ = algorithm.assign_credit(batch.with_(old_logprobs=torch.tensor([0, -1.0, 0, 0, 0, -9.0, 0])))
    assert found.loss_mask.tolist() == [False, True, False, False, False, False, False]
    assert found.advantages.tolist() == [0, 4, 0, 0, 0, 0, 0]


def test_the_optimal_token_baseline_keeps_a_tail_uncompared():
    algorithm = algorithm_of("otb")
    assert algorithm.needs == {Need.OLD_LOGPROBS, Need.SQUARED_PROBS}
    batch = rollout(("a", 1.0, True, [".##"]), ("a", 0.0, True, [".#"]))
    batch = batch.with_(old_logprobs=torch.full((5,), math.log(0.5)), squared_probs=torch.full((5,), 0.5))
    found, _ = algorithm.assign_credit(batch)
    assert found.advantages.tolist() == pytest.approx([0, 0.5, 1.0, 0, -0.5], abs=1e-6)


def test_whitening_is_the_last_step_of_credit():
    batch, metrics = credited(algorithm_of("rloo", whiten=True, distill_coef=0.5))
    found = batch.advantages[batch.loss_mask].tolist()
    assert statistics.fmean(found) == pytest.approx(0, abs=1e-6) and statistics.stdev(found) == pytest.approx(1, rel=1e-4)
    assert "distill/kl" in metrics


def test_distillation_lowers_an_advantage_by_the_distance_to_the_teacher():
    algorithm = algorithm_of("rloo", distill_coef=2.0)
    assert {Need.TEACHER_LOGPROBS, Need.OLD_LOGPROBS} <= algorithm.needs
    batch = rollout(("a", 1.0, True, [".#"]), ("a", 0.0, True, [".#"]))
    batch = batch.with_(old_logprobs=torch.full((4,), -1.0), teacher_logprobs=torch.tensor([0.0, -1.5, 0.0, -0.5]))
    found, _ = algorithm.assign_credit(batch)
    assert found.advantages.tolist() == pytest.approx([0, 1 - 2 * 0.5, 0, -1 + 2 * 0.5])


def test_the_kl_in_the_reward_adapts_after_its_use():
    algorithm = algorithm_of("reinforce_plus_plus", whiten=False, kl_reward={"coef": 0.5, "target": 0.1, "horizon": 10})
    batch = rollout(("a", 1.0, True, [".##"]))
    batch = batch.with_(old_logprobs=torch.tensor([0.0, -1.0, -2.0]), ref_logprobs=torch.tensor([0.0, -1.5, -2.25]))
    found, metrics = algorithm.assign_credit(batch)
    assert found.advantages.tolist() == pytest.approx([0, 1 - 0.25 - 0.125, 1 - 0.125])
    assert flatten(metrics)["reward_kl/kl"] == pytest.approx(0.375) and flatten(metrics)["reward_kl/coef"] == 0.5
    assert algorithm.reward_kl.coef == pytest.approx(0.5 * (1 + 0.2 * 1 / 10))
    assert found.token_rewards is None

    resumed = algorithm_of("reinforce_plus_plus", whiten=False, kl_reward={"coef": 0.5, "target": 0.1, "horizon": 10})
    resumed.restore(json.loads(json.dumps(algorithm.state())))
    assert resumed.reward_kl.coef == algorithm.reward_kl.coef != 0.5
    fixed = algorithm_of("reinforce_plus_plus", kl_reward={"coef": 0.25})
    fixed.restore(algorithm.state())
    assert fixed.reward_kl.coef == 0.25, "what is configured and does not adapt is not overruled"
    resumed.restore(fixed.state())
    assert resumed.reward_kl.coef == algorithm.reward_kl.coef


def test_the_kl_in_the_reward_adapts_to_what_trains_and_counts_a_trajectory_once():
    algorithm = algorithm_of("reinforce_plus_plus", whiten=False, kl_reward={"coef": 0.5, "target": 0.1, "horizon": 10})
    batch = rollout(("a", 1.0, True, [".##", ".#"]), ("a", 9.0, False, [".##"]), ("a", 0.0, True, [".."]))
    shift = torch.tensor([0, 0.08, 0.12, 0, 0.12, 0, 3.0, 3.0, 0, 0])
    _, metrics = algorithm.assign_credit(batch.with_(old_logprobs=-torch.ones(10), ref_logprobs=-1 - shift))
    kl = (0.10 + 0.12) / 2
    assert flatten(metrics)["reward_kl/kl"] == pytest.approx(kl)
    assert algorithm.reward_kl.coef == pytest.approx(0.5 * (1 + (kl / 0.1 - 1) * 1 / 10))

    nothing = rollout(("a", 1.0, False, [".#"]))
    unmoved = algorithm.reward_kl.coef
    _, metrics = algorithm.assign_credit(nothing.with_(old_logprobs=-torch.ones(2), ref_logprobs=-torch.ones(2)))
    assert algorithm.reward_kl.coef == unmoved and "reward_kl/kl" not in flatten(metrics)


@pytest.mark.parametrize(
    ("settings", "who"),
    [
        ({"kl_reward": {"coef": 0.1}}, "kl_reward"),
        ({"distill_coef": 1.0}, "distill_coef"),
        ({"loss": {"name": "kl_cov"}}, "loss.name=kl_cov"),
        ({"correction": {"weights": "token"}}, "correction"),
        ({"correction": {"veto": 1e-4}, "distill_coef": 1.0}, "distill_coef and correction"),
    ],
)
def test_what_reads_log_probs_before_the_step_has_them_recomputed_even_for_one_step(settings, who):
    config = GRPOConfig.model_validate(settings)
    assert Need.OLD_LOGPROBS in build_algorithm(config, StepPlan(1)).needs
    with pytest.raises(ValueError, match=rf"old_logprobs=current .* needed before it by {who}; use recompute or auto"):
        GRPOConfig.model_validate({**settings, "old_logprobs": "current"})


def test_a_constant_length_is_the_token_limit_unless_it_is_set():
    batch, _ = credited(algorithm_of("dr_grpo"))
    assert algorithm_of("dr_grpo").reducer(batch).max().item() == pytest.approx(1 / 8 / 5)
    assert algorithm_of("dr_grpo", reducer_scale=2.0).reducer(batch).max().item() == pytest.approx(1 / 2 / 5)
    with pytest.raises(ValueError, match="set reducer_scale"):
        build_algorithm(DrGRPOConfig(), StepPlan(1))


def my_loss(batch, logprobs, old_logprobs, options):
    from whet.core.losses import reinforce

    return reinforce(options["factor"] * logprobs, old_logprobs, batch.advantages)


def test_a_policy_loss_of_your_own():
    algorithm = algorithm_of("grpo", loss={"name": "tests.algo.test_algo_all:my_loss", "options": {"factor": 3.0}})
    batch, _ = credited(algorithm)
    out = near(batch)
    (slope,) = torch.autograd.grad(algorithm.loss(batch, out).terms.sum(), out.logprobs)
    torch.testing.assert_close(slope, -3 * batch.advantages)
    with pytest.raises(ValueError, match=r"cannot be called as f\(batch, logprobs, old_logprobs, options\)"):
        algorithm_of("grpo", loss={"name": "tests.algo.test_algo_all:outputs"})
    with pytest.raises(ValueError, match=r"no policy loss 'clap'; did you mean clip\? Else give one of clip, .*, or module:function"):
        algorithm_of("grpo", loss={"name": "clap"})
