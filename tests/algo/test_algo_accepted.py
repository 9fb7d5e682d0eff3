"""What the settings accept works: every accepted `[algo]` credits a rollout and has a finite loss; what is refused is named."""

from __future__ import annotations

import re
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from pydantic import Field

from tests.algo.algo_batches import rollout
from whet.algo.base import KnowsGradients, LearnsValues, Need, StepPlan
from whet.algo.config import AlgorithmConfig, GRPOConfig
from whet.algo.correction_presets import PresetName
from whet.algo.policy_config import LossName
from whet.algo.table import ALGORITHMS, build_algorithm
from whet.config import Config, ConfigError, describe, load_config
from whet.core.batch import TokenOutputs
from whet.core.choices import Bound, KLName, Level, ReducerName, ScaledReducerName
from whet.core.segments import per_sample_count
from whet.observe.metrics import flatten


class Settings(Config):
    algo: AlgorithmConfig = Field(default_factory=GRPOConfig)


KNOWN = {doc.path for doc in describe(Settings)}
BOOL = ("true", "false")
REJECT = ("[]", "[{statistic='token_k1', high=1.5}]", "[{statistic='mean_k3', high=0.5}]", "[{statistic='max_k2', high=1e-9, low=1}]")
VALUES = {
    "clip_low": ("0", "0.2", "1"),
    "clip_high": ("0", "0.28", "1e6"),
    "clip_dual": ("none", "3"),
    "reducer": (*get_args(ReducerName), *get_args(ScaledReducerName)),
    "reducer_scale": ("none", "8"),
    "entropy_coef": ("0", "0.1"),
    "kl_coef": ("0", "0.2", "inf"),
    "kl_estimator": get_args(KLName),
    "kl_unbiased": BOOL,
    "reference": ("none", *BOOL),
    "old_logprobs": ("auto", "recompute", "rollout", "current"),
    "loss.name": (*get_args(LossName), "sapu"),
    "loss.sequence_gradient": ("token", "sequence"),
    "loss.tau_positive": ("1.0", "9"),
    "loss.covariance_share": ("0.0002", "1"),
    "loss.covariance_bounds": ("[1.0, 5.0]", "[-9, 9]", "[1, 1]"),
    "loss.covariance_kl_coef": ("0.1", "0"),
    "whiten": BOOL,
    "kl_reward.coef": ("0", "0.1"),
    "kl_reward.target": ("none", "0.05"),
    "kl_reward.horizon": ("10000", "9"),
    "kl_reward.estimator": get_args(KLName),
    "distill_coef": ("0", "0.5"),
    "mask_delta": ("none", "0", "1e-4"),
    "correction.preset": get_args(PresetName),
    "correction.weights": ("none", *get_args(Level)),
    "correction.bound": get_args(Bound),
    "correction.high": ("2.0", "0.5", "inf"),
    "correction.low": ("none", "0", "0.9"),
    "correction.normalize": BOOL,
    "correction.reject": REJECT,
    "correction.veto": ("none", "0.5"),
    "correction.rejected": ("weigh", "mask"),
    "normalize_std": BOOL,
    "align": ("action", "position"),
    "zero_tail": BOOL,
    "gamma": ("0", "0.9", "1"),
    "lam": ("0", "0.95", "1"),
    "credit_over": ("actions", "all", "turns"),
    "reward_at": ("last_action", "last_token"),
    "bootstrap_truncated": BOOL,
    "value_clip": ("none", "0.2"),
    "options": ("{}",),
    "klcoef": ("0.1",),
}
ROLLOUT = [
    ("a", 1.0, True, [".##", ".#"]),
    ("a", 0.0, True, [".#.##."]),
    ("a", 9.0, False, [".#"]),
    ("b", 2.0, True, [".##"]),
    ("b", 0.0, True, [".##.#"]),
    ("c", 1.0, True, [".#"]),
    ("d", 0.0, True, [".##"]),
    ("d", 0.0, True, [".#"]),
]


def step(algorithm) -> None:
    """One rollout's credit and one optimizer step's loss in float64; every number has to be finite."""
    batch = rollout(*ROLLOUT)
    noise = 0.5 * torch.randn(8, batch.num_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = batch.loss_mask
    columns = {
        Need.OLD_LOGPROBS: (-1 + noise[0]) * mask,
        Need.REF_LOGPROBS: (-1 + noise[1]) * mask,
        Need.TEACHER_LOGPROBS: (-1 + noise[2]) * mask,
        Need.VALUES: noise[3],
        Need.SCORES: noise[3],
        Need.SQUARED_PROBS: noise[4].sigmoid(),
        Need.BASELINE: noise[5][: batch.num_samples],
    }
    needs = algorithm.needs | ({Need.SCORES} if Need.VALUES in algorithm.needs else set())
    batch = batch.with_(**{need.value: columns[need] for need in needs}, truncated=torch.arange(batch.num_samples) % 2 == 0)
    credited, metrics = algorithm.assign_credit(batch.with_(rollout_logprobs=batch.rollout_logprobs.double()))
    ready = algorithm.prepare(credited.with_(weights=algorithm.reducer(credited)))
    out = TokenOutputs(
        ((-1 + noise[6]) * mask).requires_grad_(), ((1 + noise[7]) * mask).requires_grad_(), values=noise[7].clone().requires_grad_()
    )
    found = [algorithm.loss(ready, out)]
    if isinstance(algorithm, LearnsValues):
        found.append(algorithm.value_loss(ready, out))
    sum((ready.weights * part.terms).sum() for part in found).backward()
    if isinstance(algorithm, KnowsGradients):
        skipped = per_sample_count(batch, algorithm.has_gradient(ready)) == 0
        for column in (out.logprobs, out.entropy):
            assert column.grad is None or not bool(column.grad[skipped[batch.sample_of_token]].any())
    numbers = [ready.advantages, ready.returns, ready.weights, *(part.terms for part in found)]
    numbers += [column.grad for column in (out.logprobs, out.entropy, out.values) if column.grad is not None]
    assert all(bool(column.isfinite().all()) for column in numbers)
    if bool(ready.loss_mask.any()):
        told = flatten(metrics) | {key: value for part in found for key, value in flatten(part.metrics).items()}
        assert torch.tensor([value for value in told.values() if isinstance(value, float)]).isfinite().all(), told


def names_a_key(problem: str) -> bool:
    """Whether a problem names a setting that there is: by its path, or in the table that it is about."""
    place = re.match(r"algo[\w.]*", problem)
    assert place is not None, problem
    words = re.findall(r"\w+(?:\.\w+)*", problem[place.end() :])
    named = {place[0], *(f"{place[0]}.{word}" for word in words), *(word for word in words if word.startswith("algo."))}
    return bool((named - {"algo"}) & KNOWN)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_settings_are_refused_by_name_or_train(name, data):
    keys = data.draw(st.lists(st.sampled_from(list(VALUES)), unique=True, max_size=3), label="keys")
    overrides = [f"algo.{key}={data.draw(st.sampled_from(VALUES[key]), label=key)}" for key in keys]
    try:
        config = load_config(Settings, None, [*overrides, f"algo.name={name}"]).algo
    except ConfigError as error:
        event("refused")
        assert all(names_a_key(problem) for problem in error.problems), error.problems
        return
    event("trained")
    num_steps = 1 if "algo.old_logprobs=current" in overrides else data.draw(st.sampled_from([1, 2]), label="steps")
    step(build_algorithm(config, StepPlan(num_steps, samples_per_prompt=2, max_tokens=8)))
