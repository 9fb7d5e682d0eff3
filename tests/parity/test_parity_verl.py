"""Numbers that verl computes (revision b178a3cd, recorded in float32): whet gives the same."""

from __future__ import annotations

import pytest
import torch

from whet.core.advantages import group_advantages
from whet.core.batch import batch_of
from whet.core.kl import KL_ESTIMATORS
from whet.types import Origin, Sample

NEAR = {"rtol": 1e-4, "atol": 1e-5}

# verl core_algos.kl_penalty: value, gradient
LOGPROBS = [
    -1.864066, -0.2160795, -1.177826, -0.1312353, -1.21397, -0.442489, -1.391371, -1.473025, -1.787995,
    -2.900149, -0.3790072, -1.224306, -1.505446, -3.006201, -1.824592,
]
REF = [
    -1.845645, -0.1747812, -1.228655, -0.2774545, -0.7203308, -0.4634762, -2.911794, -1.265543, -1.882495,
    -2.938988, -0.3176702, -1.14134, -0.9964949, -3.140215, -2.031542,
]
KL = {
    "k1": (
        [
            -0.01842082, -0.04129826, 0.05082929, 0.1462192, -0.4936394, 0.02098718, 1.520423, -0.2074822,
            0.09449947, 0.03883886, -0.06133699, -0.0829668, -0.5089512, 0.1340144, 0.2069495,
        ],
        [
            1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0,
        ],
    ),
    "k2": (
        [
            0.0001696632, 0.000852773, 0.001291808, 0.01069003, 0.1218399, 0.0002202309, 1.155843, 0.02152443,
            0.004465075, 0.0007542287, 0.001881113, 0.003441745, 0.1295157, 0.008979926, 0.02141404,
        ],
        [
            -0.01842082, -0.04129826, 0.05082929, 0.1462192, -0.4936394, 0.02098718, 1.520423, -0.2074822,
            0.09449947, 0.03883886, -0.06133699, -0.0829668, -0.5089512, 0.1340144, 0.2069495,
        ],
    ),
    "k3": (
        [
            0.0001707077, 0.000864625, 0.001270175, 0.01018751, 0.1446283, 0.000218749, 0.7390422, 0.02309358,
            0.004327774, 0.0007445812, 0.001920223, 0.003538966, 0.1545944, 0.00859189, 0.02001023,
        ],
        [
            -0.01859152, -0.0421629, 0.04955912, 0.1360317, -0.6382678, 0.02076846, 0.7813805, -0.2305758,
            0.09017175, 0.03809428, -0.06325722, -0.08650577, -0.6635456, 0.1254225, 0.1869392,
        ],
    ),
}


@pytest.mark.parametrize("name", KL)
def test_kl(name):
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    found = KL_ESTIMATORS[name](logprobs, torch.tensor(REF))
    found.sum().backward()
    torch.testing.assert_close(found.detach(), torch.tensor(KL[name][0]), **NEAR)
    torch.testing.assert_close(logprobs.grad, torch.tensor(KL[name][1]), **NEAR)


# verl core_algos.compute_grpo_outcome_advantage, epsilon 1e-6: the reward and the advantage of each reply
GROUPS = ["a", "a", "a", "b", "b"]
REWARDS = [
    -2.270418, -0.7432594, -1.05307, 0.9457478, -0.8307216,
]
ADVANTAGES = {
    True: [-1.133241, 0.7585078, 0.3747334, 0.7071063, -0.7071063],
    False: [-0.9148356, 0.6123232, 0.3025123, 0.8882347, -0.8882347],
}


@pytest.mark.parametrize("normalize_std", [True, False])
def test_grpo_advantages(normalize_std):
    """Without the recorded group of one reply: verl gives it its own reward, whet drops it, having nothing to compare."""
    rollout = batch_of(
        [
            Sample((0, 1), (Origin.PROMPT, Origin.MODEL), (False, True), (0.0, 0.0), (-1, 0), group, str(i), reward=reward)
            for i, (group, reward) in enumerate(zip(GROUPS, REWARDS, strict=True))
        ]
    )
    found = group_advantages(rollout, normalize_std=normalize_std)
    torch.testing.assert_close(found.float(), torch.tensor(ADVANTAGES[normalize_std]), **NEAR)
