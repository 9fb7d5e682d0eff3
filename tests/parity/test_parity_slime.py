"""Numbers that slime computes (revision 624b824a, recorded in float32): whet gives the same."""

from __future__ import annotations

import pytest
import torch

from whet.core.advantages import group_advantages
from whet.core.batch import TrainBatch, batch_of
from whet.core.kl import KL_ESTIMATORS
from whet.core.logprobs import chunked_logprobs
from whet.core.losses import clipped_surrogate
from whet.core.weights import sample_mean, token_mean
from whet.types import Origin, Sample

NEAR = {"rtol": 1e-4, "atol": 1e-5}


def batch(masks: list[list[int]], owners: list[int], rewards: list[float], group_size: int) -> TrainBatch:
    """One sample per mask, after a prompt of one token. `owners` are trajectories; groups are `group_size` trajectories."""
    return batch_of(
        [
            Sample(
                tokens=tuple(range(len(mask) + 1)),
                origin=(Origin.PROMPT, *(Origin.MODEL if m else Origin.ENVIRONMENT for m in mask)),
                loss_mask=(False, *(bool(m) for m in mask)),
                logprobs=(0.0,) * (len(mask) + 1),
                versions=(0,) * (len(mask) + 1),
                group=str(owner // group_size),
                trajectory=str(owner),
                reward=reward,
            )
            for mask, owner, reward in zip(masks, owners, rewards, strict=True)
        ]
    )


# slime.ray.rollout.RolloutManager._post_process_rewards, grpo, 3 prompts with 4 samples each
GROUP_REWARDS = [
    1.540996, -0.2934289, -2.178789, 0.5684313, -1.084522, -1.398595, 0.4033468, 0.8380263, -0.7192576,
    -0.4033435, -0.5966353, 0.1820365,
]
GROUP_NORM = {
    True: [
        1.032104, -0.1282346, -1.320791, 0.4169223, -0.7054895, -0.9917307, 0.6505302, 1.04669, -0.8388063,
        -0.04768913, -0.5317336, 1.418229,
    ],
    False: [
        1.631694, -0.2027312, -2.088092, 0.659129, -0.7740862, -1.088159, 0.713783, 1.148463, -0.3349576,
        -0.01904353, -0.2123353, 0.5663365,
    ],
}


@pytest.mark.parametrize("normalize_std", [True, False])
def test_group_norm(normalize_std):
    rollout = batch([[1]] * 12, list(range(12)), GROUP_REWARDS, 4)
    found = group_advantages(rollout, normalize_std=normalize_std)
    torch.testing.assert_close(found.float(), torch.tensor(GROUP_NORM[normalize_std]), **NEAR)


# slime.utils.ppo_utils.compute_policy_loss: (eps_clip, eps_clip_high, eps_clip_c), losses, clip fraction, gradient
OLD_LOGPROBS = [
    -1.384254, -1.45857, -0.947495, -1.855065, -0.6518419, -1.245479, -2.091382, -2.917926, -1.863387,
    -1.001098, -1.653826, -1.341892, -2.122279, -1.681752, -2.097587, -2.964786,
]
LOGPROBS = [
    -0.8863901, -0.7860014, -0.347547, -1.185048, -0.006071627, -1.285216, -2.012466, -2.81707, -1.829687,
    -0.8537519, -1.081728, -1.128688, -1.995023, -1.884414, -2.309753, -3.128531,
]
ADVANTAGES = [
    1.329029, 1.197377, -1.264516, -0.4344386, -2.180599, -1.109375, -2.041038, 0.03336523, -1.080498,
    -0.8832487, 0.9741046, 0.5631666, -1.115116, 0.1490076, -1.092301, -1.455128,
]
POLICY_LOSS = [
    (
        (0.2, 0.2, None),
        [
            -1.594835, -1.436852, 2.303979, 0.8490105, 4.159396, 1.066156, 2.208635, -0.03690586, 1.117531,
            1.023469, -1.168926, -0.6757999, 1.266446, -0.1216727, 0.8834862, 1.235344,
        ],
        [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        [
            0.0, 0.0, 2.303979, 0.8490105, 4.159396, 1.066156, 2.208635, -0.03690586, 1.117531, 1.023469, 0.0,
            0.0, 1.266446, -0.1216727, 0.8834862, 1.235344,
        ],
    ),
    (
        (0.2, 0.28, None),
        [
            -1.701157, -1.532642, 2.303979, 0.8490105, 4.159396, 1.066156, 2.208635, -0.03690586, 1.117531,
            1.023469, -1.246854, -0.6969958, 1.266446, -0.1216727, 0.8834862, 1.235344,
        ],
        [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [
            0.0, 0.0, 2.303979, 0.8490105, 4.159396, 1.066156, 2.208635, -0.03690586, 1.117531, 1.023469, 0.0,
            -0.6969958, 1.266446, -0.1216727, 0.8834862, 1.235344,
        ],
    ),
    (
        (0.2, 0.28, 3.0),
        [
            -1.701157, -1.532642, 2.303979, 0.8490105, 4.159396, 1.066156, 2.208635, -0.03690586, 1.117531,
            1.023469, -1.246854, -0.6969958, 1.266446, -0.1216727, 0.8834862, 1.235344,
        ],
        [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0],
        [
            0.0, 0.0, 2.303979, 0.8490105, 4.159396, 1.066156, 2.208635, -0.03690586, 1.117531, 1.023469, 0.0,
            -0.6969958, 1.266446, -0.1216727, 0.8834862, 1.235344,
        ],
    ),
    (
        (0.1, 0.4, 1.5),
        [
            -1.860641, -1.676327, 1.896775, 0.6516579, 3.270898, 1.066156, 2.208635, -0.03690586, 1.117531,
            1.023469, -1.363746, -0.6969958, 1.266446, -0.1216727, 0.9830706, 1.309615,
        ],
        [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0],
        [
            0.0, 0.0, 0.0, 0.0, 0.0, 1.066156, 2.208635, -0.03690586, 1.117531, 1.023469, 0.0, -0.6969958,
            1.266446, -0.1216727, 0.0, 0.0,
        ],
    ),
    (
        (0.0003, 0.0004, None),
        [
            -1.329561, -1.197855, 2.303979, 0.8490105, 4.159396, 1.109042, 2.208635, -0.03337857, 1.117531,
            1.023469, -0.9744942, -0.5633918, 1.266446, -0.1216727, 1.091973, 1.454692,
        ],
        [1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0],
        [
            0.0, 0.0, 2.303979, 0.8490105, 4.159396, 0.0, 2.208635, 0.0, 1.117531, 1.023469, 0.0, 0.0, 1.266446,
            -0.1216727, 0.0, 0.0,
        ],
    ),
]


@pytest.mark.parametrize(("clips", "losses", "clipfrac", "gradient"), POLICY_LOSS)
def test_policy_loss(clips, losses, clipfrac, gradient):
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    found = clipped_surrogate(logprobs, torch.tensor(OLD_LOGPROBS), torch.tensor(ADVANTAGES), *clips)
    found.terms.sum().backward()
    torch.testing.assert_close(found.terms.detach(), torch.tensor(losses), **NEAR)
    torch.testing.assert_close(logprobs.grad, torch.tensor(gradient), **NEAR)
    # slime's clip fraction leaves the dual clip out; whet counts every token that the clip leaves without a gradient.
    if clips[2] is None:
        assert found.clipped.float().tolist() == clipfrac
    assert found.clipped.tolist() == [slope == 0 for slope in gradient]


# slime.utils.ppo_utils.compute_approx_kl without importance weights: value, gradient
KL_LOGPROBS = [
    -1.49877, -2.314665, -0.2754323, -0.4060915, -0.9322684, -1.912236, -1.48028, -2.699334, -1.376884,
    -1.906919, -1.05668, -1.215152,
]
KL_REF = [
    -1.297096, -1.895652, -0.6350611, -0.6077632, -1.230586, -1.821218, -1.908617, -2.149032, -1.912478,
    -1.845568, -1.339839, -1.028595,
]
KL = {
    'k1': (
        [
            -0.2016734, -0.4190131, 0.3596288, 0.2016718, 0.2983176, -0.0910182, 0.4283373, -0.550302,
            0.5355937, -0.06135058, 0.2831588, -0.1865573,
        ],
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
    ),
    'k2': (
        [
            0.02033608, 0.087786, 0.06466644, 0.02033575, 0.0444967, 0.004142156, 0.09173644, 0.1514162,
            0.1434303, 0.001881947, 0.04008945, 0.01740181,
        ],
        [
            -0.2016734, -0.4190131, 0.3596288, 0.2016718, 0.2983176, -0.0910182, 0.4283373, -0.550302,
            0.5355937, -0.06135058, 0.2831588, -0.1865573,
        ],
    ),
    'k3': (
        [
            0.02177501, 0.1014472, 0.05756414, 0.01903492, 0.04038322, 0.004270792, 0.07992893, 0.1834745,
            0.1209154, 0.001921058, 0.03655893, 0.01853633,
        ],
        [
            -0.2234484, -0.5204604, 0.3020647, 0.1826369, 0.2579344, -0.09528899, 0.3484084, -0.7337766,
            0.4146783, -0.06327164, 0.2465999, -0.2050936,
        ],
    ),
}


@pytest.mark.parametrize("name", KL)
def test_kl(name):
    logprobs = torch.tensor(KL_LOGPROBS, requires_grad=True)
    found = KL_ESTIMATORS[name](logprobs, torch.tensor(KL_REF))
    found.sum().backward()
    torch.testing.assert_close(found.detach(), torch.tensor(KL[name][0]), **NEAR)
    torch.testing.assert_close(logprobs.grad, torch.tensor(KL[name][1]), **NEAR)


# slime.backends.megatron_utils.cp_utils.get_sum_of_sample_mean: its gradient by each token's term
TERMS = [
    0.4508438, 0.4298979, 0.7208777, 0.4677568, -0.4395232, -1.393296, 1.624045, -0.06762818, -0.4808393,
    -0.6856092, 0.2501962, 0.07448437, -0.9814633, -0.4665564, -0.9612222, 1.748306, -1.375056, 1.051459,
    0.553176, 0.2716436, 0.1374607, 0.2553722, 0.6851802, 0.4910911, -1.868818, -0.7571152, -1.045955,
]
MASKS = [[1, 1, 0, 1], [1, 1, 0, 1, 0, 1, 1, 1], [1, 0, 1, 1, 0, 1, 0, 0, 0], [1, 0, 1, 0, 0, 1]]
OWN_MEAN = 0.18704265356063843
"""Each sample is a trajectory."""
SHARED_MEAN = 0.013008341193199158
"""The first two samples are one trajectory: their denominator is the tokens of both."""
TOKEN_SUM = -0.3552904725074768


@pytest.mark.parametrize(
    ("reducer", "owners", "value", "scale"),
    [(sample_mean, [0, 1, 2, 3], OWN_MEAN, 4), (sample_mean, [0, 0, 1, 2], SHARED_MEAN, 3), (token_mean, [0, 1, 2, 3], TOKEN_SUM, 16)],
    ids=["sample_mean", "sample_mean-siblings", "token_mean"],
)
def test_reducers(reducer, owners, value, scale):
    """slime divides by the number of trajectories, or of tokens, outside of this function: `scale`."""
    rollout = batch(MASKS, owners, [0.0] * 4, 4)
    terms = torch.cat([torch.cat([torch.zeros(1), piece]) for piece in torch.tensor(TERMS).split([len(m) for m in MASKS])])
    found = (reducer(rollout) * terms).sum() * scale
    torch.testing.assert_close(found, torch.tensor(value), **NEAR)


# slime.utils.ppo_utils.calculate_log_probs_and_entropy with chunks of 4; gradient of the weighted sum of both
LOGITS = [
    [0.2536986, 2.712796, 1.126446, -0.2078572, -0.714923, 0.783482, -1.360181],
    [0.4818827, 0.9396178, 2.485252, 1.080604, -2.29087, -2.918463, -3.256171],
    [0.7667385, -0.3436041, -6.379297, 3.182888, -0.04933835, -1.693228, 0.05860254],
    [-1.144144, -2.509253, 0.09722167, 2.340973, -1.08204, -1.423127, 0.1150516],
    [1.252504, -3.547112, -0.4410009, 5.49335, -3.519747, 2.045932, -0.2214613],
    [-0.7797247, -2.060063, -3.089224, 1.145954, -4.191234, -0.3611026, 0.469274],
    [-0.2954718, 1.178517, 4.50653, -0.5109515, 0.3302673, -1.084117, 3.339957],
    [-1.854938, -1.951707, 2.662355, 1.801473, -1.31695, -1.865499, -4.400772],
    [2.972244, -2.818471, 2.866053, 0.7797211, -0.2303117, -0.4721795, -4.447011],
]
TARGETS = [6, 1, 1, 3, 6, 2, 4, 4, 0]
PULL_LOGPROB = [-0.4867808, -0.6038216, -0.5580962, 0.6675243, -0.1974151, 1.942783, -1.401702, -0.7625571, 0.6312134]
PULL_ENTROPY = [-1.874399, -0.9936633, 0.7184672, -0.6984538, -1.471555, 0.1777002, 1.455674, 0.6403131, 1.93553]
TOKEN_LOGPROBS = [-4.503991, -2.02165, -3.716953, -0.2687341, -5.765892, -4.895515, -4.499229, -4.36727, -0.7357876]
ENTROPY = [1.180438, 1.114346, 0.7047482, 0.8970287, 0.2482376, 1.267673, 0.7865605, 0.7871554, 1.024494]
LOGITS_GRADIENT = [
    [-0.1510298, 1.22919, -0.1439057, -0.1254967, -0.09563103, -0.1628029, -0.5503243],
    [-0.06306125, -0.6432524, 0.769178, -0.02403849, -0.01836767, -0.01154939, -0.008908614],
    [0.1419994, -0.4919236, 0.0004103982, 0.1558908, 0.0819155, 0.02327377, 0.08843388],
    [-0.06238429, -0.02163387, -0.145583, 0.4927263, -0.06530015, -0.05065065, -0.1471743],
    [-0.07869406, -0.001443265, -0.0207377, 0.4632647, -0.001478644, -0.1386789, -0.222232],
    [-0.1286845, -0.03100404, 1.933073, -1.059554, -0.00273907, -0.204099, -0.5069932],
    [0.04588846, 0.1446641, 0.5262454, 0.03849682, -1.326034, 0.02395687, 0.5467826],
    [0.02518141, 0.02327548, 0.3439333, 0.3035247, -0.7238026, 0.02496644, 0.002921208],
    [0.06104499, 0.01466767, -0.4241697, 0.1633333, 0.09757049, 0.08376881, 0.003783571],
]


def test_logprobs_and_entropy():
    logits = torch.tensor(LOGITS, requires_grad=True)
    logprobs, entropy = chunked_logprobs(
        lambda rows: rows, logits, torch.tensor(TARGETS), torch.ones(9), 4, entropy_grad=True
    )
    torch.testing.assert_close(logprobs, torch.tensor(TOKEN_LOGPROBS), **NEAR)
    torch.testing.assert_close(entropy, torch.tensor(ENTROPY), **NEAR)
    (torch.tensor(PULL_LOGPROB) @ logprobs + torch.tensor(PULL_ENTROPY) @ entropy).backward()
    torch.testing.assert_close(logits.grad, torch.tensor(LOGITS_GRADIENT), **NEAR)
