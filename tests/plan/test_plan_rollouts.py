"""The simulation of rollouts: its clock, its engine, the arithmetic of a step, and what the real scheduler makes of it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.observe.test_records import GROUPS, SAMPLE
from whet.cli import app
from whet.observe.records import RecordWriter
from whet.plan.rollouts import clock
from whet.plan.rollouts.clock import SimulatedThread, run_simulated
from whet.plan.rollouts.config import SimulationConfig
from whet.plan.rollouts.engine import SimulatedMember
from whet.plan.rollouts.simulate import simulate
from whet.plan.rollouts.world import World, read_recorded
from whet.types import Finish, Request, SamplingParams

STEP, EACH, PREFILL = 0.01, 0.001, 1000.0


def config(**changes):
    base = {
        "num_rollouts": 6,
        "skip": 2,
        "grain": 1,
        "batch": {"prompts_per_rollout": 4, "samples_per_prompt": 4},
        "engine": {"step_s": STEP, "step_s_per_request": EACH, "prefill_tokens_per_s": PREFILL, "update_s": 0.5},
        "trainer": {"tokens_per_s": 1000.0, "step_s": 2.0, "driver_s_per_turn": 0.0},
        "replies": {"prompt_tokens": 20, "median_tokens": 50, "sigma": 0.0, "max_tokens": 400},
    }
    for table, settings_ in changes.items():
        base[table] = {**base[table], **settings_} if isinstance(base.get(table), dict) else settings_
    return SimulationConfig.model_validate(base)


# The clock.


def test_simulated_time_passes_at_once_and_in_order():
    async def work():
        loop, order = asyncio.get_running_loop(), []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            order.append((seconds, loop.time()))

        await asyncio.gather(*(sleeper(s) for s in (3600.0, 1.5, 86_400.0 * 3)))
        return order

    began = time.monotonic()
    order = run_simulated(work)
    assert [seconds for seconds, _ in order] == [1.5, 3600.0, 259_200.0]
    assert all(at == pytest.approx(seconds) for seconds, at in order)
    assert time.monotonic() - began < 60


def test_work_on_a_simulated_thread_takes_what_it_says():
    async def work():
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(SimulatedThread(lambda: 7.25), lambda: "done")
        return found, loop.time()

    assert run_simulated(work) == ("done", 7.25)


def test_what_waits_for_ever_is_an_error(monkeypatch):
    monkeypatch.setattr(clock, "STUCK_S", 0.05)

    async def work():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="everything waits for something that never comes"):
        run_simulated(work)


# The engine.


class Fixed(World):
    """A world in which the reply of a conversation `<length>/<k>` has that length."""

    def plan_of(self, trajectory):
        plan = super().plan_of(trajectory)
        return replace(plan, turns=(replace(plan.turns[0], tokens=int(trajectory.split("/")[0])),))


def engine(**times):
    changed = config(engine=times)
    return SimulatedMember(changed.engine, Fixed(changed), 10_000)


async def reply(member, conversation, tokens=0, max_tokens=10_000):
    chunks = [
        chunk async for chunk in member.generate(Request(f"{conversation}/0", (0,) * tokens, SamplingParams(max_tokens), conversation))
    ]
    return sum(len(chunk.tokens) for chunk in chunks), chunks[-1].finish, asyncio.get_running_loop().time(), chunks


def test_one_request_takes_its_prefill_and_its_steps():
    found = run_simulated(lambda: reply(engine(), "30/0", tokens=100))
    assert found[:2] == (30, Finish.STOP)
    assert found[2] == pytest.approx(100 / PREFILL + 30 * (STEP + EACH))


def test_requests_that_decode_together_share_the_step():
    async def work():
        member = engine()
        found = await asyncio.gather(*(reply(member, name) for name in ("10/0", "10/1", "40/0")))
        return found, (await member.health()).busy_s

    found, busy_s = run_simulated(work)
    first = 10 * (STEP + 3 * EACH)
    assert [each[2] for each in found] == pytest.approx([first, first, first + 30 * (STEP + EACH)])
    assert busy_s == pytest.approx(found[2][2])


def test_no_more_run_together_than_may():
    async def work():
        member = engine(max_running=2)
        return await asyncio.gather(*(reply(member, f"10/{k}") for k in range(5)))

    one = 10 * (STEP + 2 * EACH)
    assert [each[2] for each in run_simulated(work)] == pytest.approx([one, one, 2 * one, 2 * one, 2 * one + 10 * (STEP + EACH)])


def test_a_limit_cuts_a_reply():
    assert run_simulated(lambda: reply(engine(), "30/0", max_tokens=7))[:2] == (7, Finish.LENGTH)


def test_an_update_hands_over_what_was_sampled_and_computes_the_context_again():
    async def work():
        member = engine()
        reading = asyncio.create_task(reply(member, "30/0", tokens=100))
        await asyncio.sleep(100 / PREFILL + 10.5 * (STEP + EACH))
        await member.pause()
        await asyncio.sleep(5.0)
        await member.update(None, 1)
        await member.resume()
        return await reading

    total, finish, at, chunks = run_simulated(work)
    assert (total, finish) == (30, Finish.STOP)
    assert [(chunk.version, len(chunk.tokens)) for chunk in chunks] == [(0, 10), (1, 20)]
    assert at == pytest.approx(100 / PREFILL + 5.0 + 110 / PREFILL + 30 * (STEP + EACH))


def test_an_abort_keeps_what_was_sampled():
    async def work():
        member = engine()
        reading = asyncio.create_task(reply(member, "30/0"))
        waiting = asyncio.create_task(reply(member, "30/1"))
        await asyncio.sleep(7.5 * (STEP + 2 * EACH))
        await member.abort("30/0/0")
        await member.abort("nobody")
        return await reading, await waiting

    (cut, whole) = run_simulated(work)
    assert cut[:2] == (7, Finish.ABORT) and whole[:2] == (30, Finish.STOP)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    starts=st.lists(st.floats(0, 2), min_size=12, max_size=12),
    pauses=st.lists(st.floats(0.01, 1.0), max_size=3),
    most=st.integers(1, 6),
)
def test_every_request_gets_its_tokens_whatever_happens(lengths, starts, pauses, most):
    async def work():
        member = engine(max_running=most)

        async def late(k, length):
            await asyncio.sleep(starts[k])
            return await reply(member, f"{length}/{k}", tokens=5)

        async def pausing():
            for version, seconds in enumerate(pauses):
                await asyncio.sleep(seconds)
                await member.pause()
                await member.update(None, version + 1)
                await asyncio.sleep(seconds)
                await member.resume()

        found = await asyncio.gather(*(late(k, length) for k, length in enumerate(lengths)), pausing())
        return found[:-1], (await member.health()).busy_s, asyncio.get_running_loop().time()

    found, busy_s, at = run_simulated(work)
    assert [each[:2] for each in found] == [(length, Finish.STOP) for length in lengths]
    assert sum(lengths) / most * (STEP + EACH * most) <= busy_s + 1e-6 <= at + 1e-5
    for *_, chunks in found:
        versions = [chunk.version for chunk in chunks]
        assert versions == sorted(versions)


# A run.


def test_a_synchronous_step_is_the_sum_of_its_parts():
    found = simulate(config())
    decoding = 50 * (STEP + 16 * EACH)
    prefill = 4 * 20 / PREFILL
    trained = 16 * (20 + 50) / 1000 + 2
    assert found.step_s == pytest.approx(prefill + decoding + trained + 0.5, rel=1e-3)
    assert found.engine_idle == pytest.approx(1 - (prefill + decoding) / found.step_s, abs=1e-3)
    assert found.trainer_idle == pytest.approx(1 - trained / found.step_s, abs=1e-3)
    assert found.tokens_per_s == pytest.approx(16 * 50 / found.step_s)
    assert (found.mean_age, found.max_age, found.dropped_tokens, found.masked_tokens) == (0, 0, 0, 0)


def test_with_staleness_one_the_slower_side_gives_the_pace():
    found = simulate(config(control={"max_staleness": 1}, num_rollouts=12, skip=4))
    trained = 16 * (20 + 50) / 1000 + 2
    assert found.step_s == pytest.approx(trained + 0.5, rel=0.02)
    assert found.trainer_idle == pytest.approx(0.5 / found.step_s, abs=0.02)
    assert 0 < found.mean_age <= found.max_age == 1


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
def test_no_trained_token_is_older_than_allowed(max_staleness):
    tail = {"sigma": 1.2, "turns": 2.0}
    found = simulate(config(control={"max_staleness": max_staleness}, replies=tail, num_rollouts=14, skip=4))
    assert found.max_age <= max_staleness


def test_partial_rollouts_shorten_a_long_tail():
    tail = {"sigma": 1.2}
    whole = simulate(config(replies=tail, num_rollouts=16))
    partial = {"partial": True, "over_sample": 2.0, "max_staleness": 3, "overlap": False}
    found = simulate(config(replies=tail, num_rollouts=16, control=partial))
    assert found.step_s * found.trainer_idle < 0.8 * whole.step_s * whole.trainer_idle and found.max_age >= 1


def test_filters_drop_groups_of_equal_rewards():
    found = simulate(config(control={"filters": [{"name": "zero_std"}]}, replies={"success": 0.5}))
    assert found.dropped_tokens > 0
    assert simulate(config(replies={"success": 0.5})).dropped_tokens == 0


def test_more_engines_take_less_time():
    one, four = (simulate(config(engine={"count": count, "max_running": 4})) for count in (1, 4))
    assert four.step_s < one.step_s
    rolled = [found.step_s * (1 - found.trainer_idle) for found in (one, four)]
    assert rolled[0] == pytest.approx(rolled[1])


def test_tools_and_rewards_take_their_time():
    plain = simulate(config(replies={"turns": 3.0, "tool_s": 0.0}))
    slow = simulate(config(replies={"turns": 3.0, "tool_s": 10.0, "reward_s": 5.0}))
    assert slow.step_s > plain.step_s + 10.0


def test_sharing_processors_slows_both_down():
    def slowed(trainer, engine):
        slowdowns = {"trainer": {"shared_slowdown": trainer}, "engine": {"shared_slowdown": engine}}
        return simulate(config(control={"max_staleness": 1}, **slowdowns))

    free, trainer, engine, both = slowed(0.0, 0.0), slowed(0.5, 0.0), slowed(0.0, 0.5), slowed(0.5, 0.5)
    assert both.step_s > 1.1 * free.step_s
    trained = [found.step_s * (1 - found.trainer_idle) for found in (free, trainer, engine)]
    assert trained[1] > 1.1 * trained[0] and trained[2] == pytest.approx(trained[0], rel=0.01)
    sampled = [found.step_s * (1 - found.engine_idle) for found in (free, trainer, engine)]
    assert sampled[2] > 1.1 * sampled[0] and sampled[1] < 1.05 * sampled[0]


def test_a_turn_takes_longer_while_the_trainer_computes():
    settings = {"control": {"max_staleness": 1}, "trainer": {"driver_s_per_turn": 1.0, "step_s": 10.0}}
    free, slowed = (simulate(config(**settings, engine={"shared_slowdown": by})) for by in (0.0, 1.0))
    assert slowed.step_s > 1.1 * free.step_s


def test_the_driver_is_one_thread():
    found = simulate(config(trainer={"driver_s_per_turn": 1.0}))
    assert found.step_s == pytest.approx(simulate(config()).step_s + 16, rel=0.02)


def test_one_seed_gives_the_same_figures_and_another_others():
    tail = {"sigma": 0.8, "turns": 2.0}
    one, again, other = (simulate(config(replies=tail, seed=seed, control={"max_staleness": 1})) for seed in (0, 0, 1))
    assert replace(one, real_s=0.0) == replace(again, real_s=0.0)
    assert one.step_s != other.step_s


def test_grains_change_little():
    fine, coarse = (simulate(config(grain=grain, replies={"median_tokens": 320, "max_tokens": 4000})) for grain in (1, 8))
    assert coarse.step_s == pytest.approx(fine.step_s, rel=0.03)


# Replies.


def test_lengths_are_those_of_the_settings():
    world = World(config(replies={"median_tokens": 100, "sigma": 0.5, "turns": 4.0, "max_tokens": 10_000}))
    plans = [world.plan_of(f"t{i}/0") for i in range(3000)]
    assert sum(len(plan.turns) for plan in plans) / 3000 == pytest.approx(4.0, rel=0.1)
    lengths = sorted(turn.tokens for plan in plans for turn in plan.turns)
    assert lengths[len(lengths) // 2] == pytest.approx(100, rel=0.05)
    deviation = math.sqrt(sum((math.log(n) - math.log(100)) ** 2 for n in lengths) / len(lengths))
    assert deviation == pytest.approx(0.5, rel=0.1)


def test_replies_are_those_of_a_runs_records(tmp_path):
    RecordWriter(tmp_path).write(0, GROUPS, [SAMPLE])
    ((plan,),) = read_recorded(tmp_path, 1)
    scored = [t for group in GROUPS for t in group.trajectories if t.rewards is not None]
    (trajectory,) = scored
    assert [turn.tokens for turn in plan.turns] == [len(turn.tokens) for turn in trajectory.turns]
    assert plan.prompt == len(trajectory.turns[0].context) and plan.reward == trajectory.rewards.total
    assert plan.turns[-1].answer == 0
    found = simulate(config(replies={"records": str(tmp_path)}))
    assert found.step_s > 0


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no records"):
        simulate(config(replies={"records": str(tmp_path)}))


# The command.


def told(*arguments):
    found = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return found.exit_code, found.output


def test_the_command_prints_and_writes_its_figures(tmp_path):
    file, report = tmp_path / "run.toml", tmp_path / "out.json"
    file.write_text("num_rollouts = 4\nskip = 1\nbatch = {prompts_per_rollout = 2, samples_per_prompt = 2}\n")
    status, output = told("--rollouts", file, "engine.count=2", "--json", report)
    assert status == 0 and "engines idle" in output
    assert json.loads(report.read_text())["rollouts"] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine.cuont=2"], "did you mean engine.count"),
        (["skip=12"], "skip=12 leaves none of num_rollouts=12 to report"),
        (["control.partial=true", "control.max_staleness=1"], "control.partial has no meaning with overlap"),
    ],
)
def test_what_is_wrong_with_the_settings_is_said(tmp_path, arguments, words):
    (tmp_path / "run.toml").write_text("")
    status, output = told("--rollouts", tmp_path / "run.toml", *arguments)
    assert status != 0 and words in " ".join(output.split())


def test_without_either_the_command_asks_for_one():
    for arguments in ([], ["one", "two"]):
        status, output = told(*arguments)
        assert status == 2 and "--rollouts" in output
