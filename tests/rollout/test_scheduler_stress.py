"""Hundreds of conversations against an engine, tools and rewards that fail, hang, talk nonsense and are killed: each ends in one outcome,
no task is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
import zlib
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.rollout.rolling import World
from tests.rollout.tiny_engine import STOPS, TURNS, Policy, tiny_engine
from whet.data.parsers import Malformed, Parsed
from whet.data.template import Renderer
from whet.engine.base import EngineFailed, EngineRefused
from whet.env.calculator import calculator
from whet.env.limits import Limits
from whet.env.tool_env import ToolEnv
from whet.env.tools import Tool
from whet.reward.function import function_reward
from whet.reward.pool import WorkerPool
from whet.rollout.control import ControlConfig
from whet.types import Message, Outcome, SamplingParams, ToolCall

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:the engine decodes with torch")]
REWARD = """
import os, signal, time, zlib

def score(trajectory):
    kind = zlib.crc32((trajectory.id + trajectory.response).encode()) % 50
    if kind == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == 1:
        time.sleep(60)
    if kind == 2:
        raise KeyError("difficulty")
    return {3: "garbage", 4: float("nan"), 5: None}.get(kind, kind / 50)
"""


async def hangs() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return ""


def hangs_on_its_thread() -> str:
    """Answers when nobody waits any more."""
    time.sleep(0.2)
    return ""


def breaks() -> str:
    """Breaks."""
    raise OSError("no disk")


def babbles() -> str:
    """Says too much, of no use."""
    return "\ufffd\x00 <tool_call>" * 1000


CALLS = {
    **dict.fromkeys(range(8), ToolCall("calculator", {"expression": "12*3"}, "call_0")),
    8: ToolCall("calculator", {"expression": "12**3"}, "call_0"),
    9: ToolCall("calculator", {"n": [1]}, "call_0"),
    10: ToolCall("hangs", {}, "call_0"),
    11: ToolCall("hangs_on_its_thread", {}, "call_0"),
    12: ToolCall("breaks", {}, "call_0"),
    13: ToolCall("babbles", {}, "call_0"),
    14: ToolCall("nowhere", {}, "call_0"),
}
"""What a random model's texts stand for, by a number that is made from them."""


def parse(text: str) -> Parsed:
    kind = zlib.crc32(text.encode()) % 24
    if kind == 15:
        raise IndexError("a parser that fails")
    if kind == 16:
        return Parsed(Message("assistant", text), (Malformed("no call", 0),))
    return Parsed(Message("assistant", text, (CALLS[kind],) if kind in CALLS else ()))


class Chaos:
    """An engine that fails, is told to abort, and hangs, now and then. It keeps what it handed over since a conversation was opened."""

    def __init__(self, engine, rng):
        self._engine, self._rng = engine, rng
        self.sampled = defaultdict(list)
        self.seen: Counter[str] = Counter()
        self.aborters: set[asyncio.Task] = set()
        step = engine.core.step

        def failing():
            self.seen["step"] += 1
            if self.seen["step"] % 80 == 0:
                raise MemoryError("out of memory")
            return step()

        self._steps = pytest.MonkeyPatch()
        self._steps.setattr(engine.core, "step", failing)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def undo(self):
        self._steps.undo()

    def open(self, conversation):
        self.sampled.pop(conversation, None)
        self._engine.open(conversation)

    async def generate(self, request):
        kind = self._rng.choice([*[""] * 60, "fails", "breaks", "refuses", "aborts", "aborts", *["hangs"][: self._rng.random() < 0.3]])
        self.seen[kind] += 1
        if kind == "fails":
            raise EngineFailed("it is gone")
        if kind == "refuses":
            raise EngineRefused("it never fits")
        if kind == "aborts":
            aborter = asyncio.create_task(self._abort_soon(request.id))
            self.aborters.add(aborter)
            aborter.add_done_callback(self.aborters.discard)
        async for chunk in self._engine.generate(request):
            self.sampled[request.conversation] += zip(chunk.tokens, chunk.logprobs, strict=True)
            yield chunk
            if kind == "breaks":
                raise ConnectionResetError("half way")
            if kind == "hangs" and chunk.finish is None:
                await asyncio.sleep(60)

    async def _abort_soon(self, request_id):
        await asyncio.sleep(self._rng.random() * 0.01)
        await self._engine.abort(request_id)


async def kill_workers(pool, rng, count):
    """From outside, at any moment."""
    while True:
        await asyncio.sleep(rng.random())
        if pool.pids:
            os.kill(rng.choice(pool.pids), signal.SIGKILL)
            count["killed"] += 1


def open_files():
    return sorted(os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}"))


def children():
    return {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == os.getpid()}


def _parent(path):
    try:
        return int(path.read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None


class Left:
    """What there was before, and what is more by now."""

    def __init__(self):
        self.threads, self.files, self.children = set(threading.enumerate()), Counter(open_files()), children()

    def check(self):
        deadline = time.monotonic() + 10
        while (more := set(threading.enumerate()) - self.threads) and time.monotonic() < deadline:
            time.sleep(0.02)  # a tool's thread that nobody waits for ends by itself
        assert not more
        assert not Counter(open_files()) - self.files
        assert not children() - self.children


async def storm(control, seed, reward_file, num_rollouts, groups):
    rng, count = random.Random(seed), Counter()
    pool = WorkerPool(2, 0.3)
    reward = function_reward(f"{reward_file}:score", {}, pool, 0.3)
    tools = [Tool(function) for function in (calculator, hangs, hangs_on_its_thread, breaks, babbles)]
    found = []
    try:
        async with tiny_engine() as engine:
            chaos = Chaos(engine, rng)
            policy = Policy()
            await engine.update(policy.weights(0), 0)
            world = World(
                control,
                groups=groups,
                samples=5,
                num_rollouts=num_rollouts,
                engine=chaos,
                reward=reward,
                keep=lambda group: "fussy" if zlib.crc32(group.task.id.encode()) % 5 == 0 else None,
                make_env=lambda: ToolEnv(tools, timeout_s=0.05, max_reply_chars=100),
                renderer=Renderer(TURNS.tokenizer, parse),
                params=SamplingParams(24, stop_token_ids=STOPS),
                limits=Limits(4, 400, 24),
                timeout_s=1.5,
                max_in_flight=30,
                chunk_tokens=4,
            )
            killer = asyncio.create_task(kill_workers(pool, rng, count))
            for _ in range(num_rollouts):
                taken = await world.take()
                check_trajectories(world, taken, chaos)
                found.append(taken)
                await asyncio.sleep(0.01)
                version = world.progress.version + 1
                await engine.update(policy.weights(version % 2), version)
                world.learn(taken)
            await world.rollouts.close()
            world.check()
            killer.cancel()
            await asyncio.gather(killer, *chaos.aborters, return_exceptions=True)
            chaos.undo()
            await asyncio.sleep(0)
            pool_of = engine.core.scheduler.pool
            assert pool_of.num_free == pool_of.num_blocks and not engine.core.scheduler.running and not engine.core.scheduler.waiting
            assert not engine._calls and not engine._open and not engine.core.rows.num_tokens
            await asyncio.sleep(0.05)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not [task for task in left if task.get_name().startswith(("rollout", "engine"))], left
    finally:
        pool.close()
    assert not pool.pids
    return world, found, chaos.seen + count


def check_trajectories(world, taken, chaos):
    for group in taken.groups:
        assert [t.id for t in group.trajectories] == [f"{group.task.id}/{k}" for k in range(5)]
        for t in group.trajectories:
            assert t.outcome.valid == (t.rewards is not None)
            if t.outcome is not Outcome.ABORTED:  # one that the engine was told to abort has no error
                assert (t.error is None) == t.outcome.valid
            kept = [(token, logprob) for turn in t.turns for token, logprob in zip(turn.tokens, turn.logprobs, strict=True)]
            assert kept == chaos.sampled[t.id], t.id
    assert len(taken.groups) == world.groups
    reasons = {group.dropped for group in taken.dropped}
    assert reasons <= {"fussy", "retried", "left_over", "too_old"}


MODES = {
    "sync": ControlConfig(retries=1, retry_budget=20, over_sample=1.5, max_error_rate=1),
    "partial": ControlConfig(retries=1, max_staleness=1, overlap=False, partial=True, over_sample=1.5, max_partial_age=1, max_error_rate=1),
    "overlap": ControlConfig(retries=2, max_staleness=2, max_groups=15, max_error_rate=1),
}


@pytest.fixture
def impatient(monkeypatch):
    """Engines that hang are left behind soon."""
    monkeypatch.setattr("whet.env.sampling.ABORT_GRACE_S", 0.2)
    monkeypatch.setattr("whet.rollout.group_run.ABORT_GRACE_S", 0.5)


@pytest.mark.parametrize("mode", list(MODES))
def test_hundreds_of_conversations_in_a_storm(mode, tmp_path, impatient):
    weather(mode, tmp_path, seed=1, num_rollouts=4, groups=8)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("seed", [2, 3])
def test_five_hundred_conversations_in_a_storm(mode, seed, tmp_path, impatient):
    weather(mode, tmp_path, seed=seed, num_rollouts=10, groups=10)


def weather(mode, folder, seed, num_rollouts, groups):
    (folder / "stormy.py").write_text(REWARD)
    before = Left()
    world, found, seen = run_long(storm(MODES[mode], seed, folder / "stormy.py", num_rollouts, groups))
    before.check()
    assert len(world.learned) == num_rollouts * groups == len(set(world.learned))
    ended = [t for taken in found for group in [*taken.groups, *taken.dropped] for t in group.trajectories]
    assert len(ended) >= 5 * len(world.learned)
    assert set(Counter(t.outcome for t in ended)) >= set(Outcome) - {Outcome.TRUNCATED}, "every kind of weather was met"
    assert min(seen[kind] for kind in ("fails", "breaks", "refuses", "aborts", "killed")) > 0 and seen["step"] > 80, seen
    assert max(len(t.turns) for t in ended) > 2 and any(t.counts.get("tool_errors") for t in ended)


def run_long(coroutine):
    async def bounded():
        async with asyncio.timeout(240):
            return await coroutine

    return asyncio.run(bounded())
