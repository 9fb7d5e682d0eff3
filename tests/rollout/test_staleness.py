"""No token trains that is older than the bound, and every token is of the version that is recorded for it: whatever ends when, and across
restarts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.rollout.rolling import World
from tests.rollout.scripted import run
from tests.rollout.tiny_engine import STOPS, TEMPERATURE, TURNS, Policy, tiny_engine
from whet.env.calculator import calculator
from whet.env.limits import Limits
from whet.env.tool_env import ToolEnv
from whet.env.tools import Tool
from whet.observe.metrics import flatten
from whet.rollout.control import ControlConfig
from whet.rollout.samples import samples_of, samples_of_groups
from whet.rollout.staleness import bounded
from whet.types import UNSAMPLED, Origin, Rewards, Sample, SamplingParams

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:the engine decodes with torch")]
PARAMS = SamplingParams(24, temperature=TEMPERATURE, stop_token_ids=STOPS)


class SlowEnv(ToolEnv):
    """Tools that take their time, each another."""

    def __init__(self, rng):
        super().__init__([Tool(calculator)])
        self._rng = rng

    async def step(self, reply):
        await asyncio.sleep(self._rng.choice((0, 0, 0.001, 0.004)))
        return await super().step(reply)


def world_of(engine, control, seed, num_rollouts, **changes):
    rng = random.Random(seed)

    async def score(trajectory):
        await asyncio.sleep(rng.choice((0, 0, 0.002)))
        return Rewards(float(len(trajectory.response) % 3))

    settings = {"groups": 2, "samples": 2, "reward": score, "make_env": lambda: SlowEnv(rng), "renderer": TURNS, "params": PARAMS}
    settings |= {"limits": Limits(4, 300, 24), "num_rollouts": num_rollouts, "chunk_tokens": 4, **changes}
    return World(control, engine=engine, **settings)


async def play(control, policy, seed, restarts: Sequence[str], too_old="mask"):
    """A run of as many rollouts as `restarts` has entries, each of which says what comes behind its update: nothing, a checkpoint that is
    gone back to after some more was played (kill), or a stop with everything put back.

    Returns:
        Of each rollout the version that was trained, its samples before and after the bound, and what was dropped.
    """
    rng = random.Random(seed)
    found = []
    async with tiny_engine() as engine:
        await engine.update(policy.weights(0), 0)
        world = world_of(engine, control, seed, len(restarts))
        for restart in restarts:
            taken = await world.take()
            samples = samples_of_groups(taken.groups)
            kept, metrics = bounded(samples, world.progress.version, control.max_staleness, too_old)
            cut = [sample for group in taken.dropped for t in group.played for sample in samples_of(t)]
            found.append((world.progress.version, samples, kept, cut, flatten(metrics)))
            await asyncio.sleep(rng.choice((0, 0.003, 0.01)))
            version = world.progress.version + 1
            await engine.update(policy.weights(version), version)
            world.learn(taken)
            if restart == "kill":
                snapshot = world.snapshot()
                await asyncio.sleep(rng.choice((0, 0.005)))
                await world.rollouts.close()
                world.restart(snapshot)
            elif restart == "stop":
                await world.rollouts.put_back()
                world.restart(world.snapshot())
            if restart != "on":
                await engine.resume()  # a new process has a new engine
        await world.rollouts.close()
        assert engine.core.scheduler.pool.num_free == engine.core.scheduler.pool.num_blocks
    return found


def check_bound(version, samples: Sequence[Sample], kept: Sequence[Sample], metrics, max_staleness, too_old):
    """The mask, by its definition."""
    num_masked, ages = 0, []
    for sample, bound in zip(samples, kept, strict=True):
        old = [mark and version - v > max_staleness for mark, v in zip(sample.loss_mask, sample.versions, strict=True)]
        gone = [mark and (is_old or (too_old == "drop" and any(old))) for mark, is_old in zip(sample.loss_mask, old, strict=True)]
        assert bound == replace(sample, loss_mask=tuple(m and not g for m, g in zip(sample.loss_mask, gone, strict=True)))
        num_masked += sum(gone)
        ages += [version - v for mark, v in zip(bound.loss_mask, bound.versions, strict=True) if mark]
    assert max(ages, default=0) <= max_staleness and min(ages, default=0) >= 0
    assert metrics["staleness/masked_tokens"] == num_masked and metrics["staleness/max"] == max(ages, default=0)
    if ages:
        assert metrics["staleness/mean"] == pytest.approx(sum(ages) / len(ages))


def check_provenance(policy, samples: Sequence[Sample]):
    """Each token's log-prob is that of the version recorded for it; versions never fall within a trajectory."""
    expected = {version: policy.logprobs(samples, version) for version in policy.versions}
    num_alike = num_sampled = 0
    for i, sample in enumerate(samples):
        sampled = [place for place, origin in enumerate(sample.origin) if origin is Origin.MODEL]
        assert all((v == UNSAMPLED) == (o is not Origin.MODEL) for v, o in zip(sample.versions, sample.origin, strict=True))
        its = [sample.versions[place] for place in sampled]
        assert its == sorted(its)
        for place in sampled:
            found = sample.logprobs[place]
            rounding = 1e-9 + 2**-24 * abs(found)  # it is of 32 bits
            alike = {v for v, each in expected.items() if abs(float(each[i][place - 1]) - found) <= rounding}
            assert sample.versions[place] in alike
            num_alike += len(alike) - 1
            num_sampled += 1
    assert num_alike <= num_sampled / 1000, "and no other version would do"


RESTARTS = st.lists(st.sampled_from(["on", "on", "kill", "stop"]), min_size=4, max_size=6)
CHECKED = settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@CHECKED
@given(st.integers(0, 10**6), RESTARTS, st.integers(1, 2), st.sampled_from(["mask", "drop"]), st.sampled_from([None, 1]))
def test_under_overlap_no_token_is_too_old_and_each_is_of_its_version(seed, restarts, max_staleness, too_old, max_partial_age):
    control = ControlConfig(max_staleness=max_staleness, too_old=too_old, max_partial_age=max_partial_age)
    check(control, seed, restarts)


@CHECKED
@given(st.integers(0, 10**6), RESTARTS, st.integers(0, 2), st.sampled_from(["mask", "drop"]), st.sampled_from([None, 1]))
def test_partial_trajectories_are_bounded_and_of_their_versions(seed, restarts, max_staleness, too_old, max_partial_age):
    settings = {"partial": True, "overlap": False, "over_sample": 2.0}
    check(ControlConfig(max_staleness=max_staleness, too_old=too_old, max_partial_age=max_partial_age, **settings), seed, restarts)


def check(control, seed, restarts):
    policy = Policy()
    found = run(play(control, policy, seed, restarts, control.too_old))
    for version, samples, kept, _, metrics in found:
        check_bound(version, samples, kept, metrics, control.max_staleness, control.too_old)
    everything = [sample for _, samples, _, cut, _ in found for sample in [*samples, *cut]]
    assert len(everything) >= 4 * len(restarts)
    check_provenance(policy, everything)


def test_the_schedules_do_mix_versions():
    """What the properties are about happens: tokens of several versions in one trajectory, and tokens over the bound."""
    mixed, masked = 0, 0
    for seed in range(3):
        control = ControlConfig(max_staleness=0, partial=True, overlap=False, over_sample=2.0)
        for _, samples, _, _, metrics in run(play(control, Policy(), seed, ["on", "kill", "on", "stop", "on", "on"])):
            mixed += sum(len(set(sample.versions) - {UNSAMPLED}) > 1 for sample in samples)
            masked += metrics["staleness/masked_tokens"]
    assert mixed > 0 and masked > 0


@pytest.mark.parametrize("control", [
    ControlConfig(max_staleness=2),
    ControlConfig(max_staleness=2, overlap=False, partial=True, over_sample=2.0),
    ControlConfig(),
], ids=["overlap", "partial", "sync"])  # fmt: skip
def test_a_trajectory_draws_the_same_noise_by_position_whatever_interrupts_it(control):
    """Updates that change nothing: every trajectory is token for token the same, however often the run is stopped or killed."""

    def tokens(restarts, seed):
        found = run(play(control, Policy(moves=0.0), seed, restarts))
        return {sample.trajectory: sample.tokens for _, samples, _, _, _ in found for sample in samples}

    whole = tokens(["on"] * 5, 0)
    for seed in range(2):
        again = tokens(["kill", "stop", "kill", "stop", "on"], seed)
        both = whole.keys() & again.keys()
        assert len(both) >= 12
        assert {name: again[name] for name in both} == {name: whole[name] for name in both}
