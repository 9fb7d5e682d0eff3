"""Five hundred trajectories with sandboxes, servers of tools and programs that fail, hang, babble and are killed, and an engine that does
so, too: one outcome each, no token lost, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import tempfile
import zlib
from collections import Counter, defaultdict

import pytest

from tests.env.test_mcp import STDLIB
from tests.fakes import HANG, FakeEngine
from tests.left import Left, below
from tests.reach import open_to_all
from tests.rollout.rolling import World
from tests.rollout.scripted import RENDERER, STOP, TEXTS
from whet.data.parsers import Malformed, Parsed
from whet.data.template import Renderer
from whet.engine.base import EngineFailed, EngineRefused
from whet.env.build import EnvConfig, build_env_factory
from whet.env.limits import Limits
from whet.env.sandbox.config import SandboxConfig
from whet.rollout.control import ControlConfig
from whet.types import Chunk, Finish, Message, Outcome, SamplingParams, ToolCall

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of this machine need Linux"),
]
SANDBOX = SandboxConfig(timeout_s=1, memory_mb=256, max_processes=16, disk_mb=4)
IN_SANDBOX = [
    "echo 36", "sleep 600", "exit 3", "kill -9 -1", "kill -9 $$", "head -c 2000000 /dev/zero", "yes > file; echo full",
    "sleep 600 & echo on",
    "for i in 1 2 3 4 5 6 7 8 9; do sleep 9 & done; wait", "printf '\\377\\000<tool_call>'", "cat /proc/1/environ", "rm -rf . .* 2>&1",
]  # fmt: skip
OF_SERVER = ["add", "note", "table", "picture", "fail", "refuse", "break", "hang", "crash", "garbage", "babble", "add", "note"]
WORDS = " ".join(TEXTS[:2]).split()
CALLS: dict[str, list[tuple[str, dict]]] = {
    "sandboxes": [
        *(("shell", {"command": command}) for command in IN_SANDBOX),
        ("python", {"code": "print(6 * 7)"}),
        ("python", {"code": "import os; os.fork(); print('a' * 10000)"}),
        ("python", {"code": "x = 'a' * (1 << 30)"}),
        ("files", {"action": "write", "path": "a/b", "text": "x"}),
        ("files", {"action": "read", "path": "../x"}),
        *(("m_" + name, {"a": 1, "path": "x"} if name != "add" else {"a": 1}) for name in OF_SERVER[:6]),
    ],
    "servers": [("m_" + name, {"a": 1} if name == "add" else {"path": "x"}) for name in OF_SERVER],
    "programs": [],
}
PROGRAM = """
import json, os, random, subprocess, sys, time, urllib.request
task = json.load(open(os.environ["WHET_TASK"]))
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for _ in range(2):
    body = json.dumps({"model": "m", "messages": task["prompt"]}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
end = random.randrange(8)
if end == 0: time.sleep(600)
if end == 1: os.kill(os.getpid(), 9)
if end == 2: subprocess.Popen(["sleep", "600"], start_new_session=True)
if end == 3: os.write(1, bytes(1000) * 1000)
open(os.environ["WHET_SCORE"], "w").write("no number" if end == 4 else "0.5")
"""


def environment(kind, isolated):
    mcp = {"name": "mcp", "command": STDLIB, "prefix": "m_", "sandbox": isolated, "session": "trajectory" if kind == "servers" else "group"}
    if kind == "programs":
        options = {"command": [sys.executable, "-c", PROGRAM], "score": "file"}
        return build_env_factory(EnvConfig(name="program", options=options, sandbox=SANDBOX))
    tools = [mcp] if kind == "servers" else ["shell", "python", "files", mcp]
    return build_env_factory(EnvConfig(name="tools", tools=tools, tool_timeout_s=2.0, sandbox=SANDBOX, max_reply_chars=200))


def parser(kind):
    """A random text stands for a call, for several, for none, or for one that cannot be read."""
    calls = CALLS[kind]

    def parse(text):
        number = zlib.crc32(text.encode())
        if number % 9 == 0 or not calls:
            return Parsed(Message("assistant", text))
        if number % 9 == 1:
            return Parsed(Message("assistant", text), (Malformed("no call", 0),))
        chosen = [calls[(number // 9 + i) % len(calls)] for i in range(1 + (number % 9 == 2))]
        return Parsed(Message("assistant", text, tuple(ToolCall(name, given, f"c{i}") for i, (name, given) in enumerate(chosen))))

    return parse


def stormy_engine(rng):
    def script(request):
        tokens = [(token, -0.01 * (token + 1)) for token in RENDERER.encode(" ".join(rng.choices(WORDS, k=5)))]
        kind = rng.randrange(150)
        broken = {0: EngineFailed("it is gone"), 1: EngineRefused("it never fits"), 2: ConnectionResetError("half way"), 3: HANG}
        if kind in broken:
            return [Chunk((tokens[0][0],), (-0.5,), 0), broken[kind]]
        return [*tokens, Finish.LENGTH if kind == 4 else (STOP, -0.5), *([] if kind == 4 else [Finish.STOP])]

    return FakeEngine(script)


async def kill_some(before, rng, killed):
    """From outside, at any moment, any process that was started."""
    while True:
        await asyncio.sleep(2 * rng.random())
        if found := below(os.getpid()) - before:
            try:
                os.kill(rng.choice(sorted(found)), signal.SIGKILL)
                killed["processes"] += 1
            except ProcessLookupError:
                continue


async def abort_some(engine, rng, killed):
    while True:
        await asyncio.sleep(rng.random() * 3)
        if engine.running:
            await engine.abort(rng.choice(sorted(engine.running)))
            killed["requests"] += 1


def storm(make, kind, rollouts, groups, seed):
    """The trajectories, with the calls that the storm killed."""
    rng, killed, found = random.Random(seed), Counter(), []
    engine = stormy_engine(rng)

    async def main():
        world = World(
            ControlConfig(max_error_rate=1),
            groups=groups,
            samples=5,
            num_rollouts=rollouts,
            engine=engine,
            make_env=make,
            timeout_s=3.0 if kind == "programs" else 6.0,
            renderer=Renderer(RENDERER.tokenizer, parser(kind)),
            params=SamplingParams(50, stop_token_ids=(STOP,)),
            limits=Limits(4, 900, 50),
            max_in_flight=12,
        )
        storms = [asyncio.create_task(each) for each in (kill_some(below(os.getpid()), rng, killed), abort_some(engine, rng, killed))]
        for _ in range(rollouts):
            taken = await world.roll()
            found.extend(t for group in taken.groups for t in group.trajectories)
            assert not taken.dropped
        for each in storms:
            each.cancel()
        await asyncio.gather(*storms, return_exceptions=True)
        await world.rollouts.close()
        await world.rollouts._runner.resources.aclose()
        await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    engine.check_idle()
    check_tokens(found, engine)
    return found, killed


def check_tokens(trajectories, engine):
    """Each has what the engine handed over for it, each token once."""
    sampled = defaultdict(list)
    for conversation, chunk in engine.chunks:
        sampled[conversation] += zip(chunk.tokens, chunk.logprobs, strict=True)
    for t in trajectories:
        kept = [each for turn in t.turns for each in zip(turn.tokens, turn.logprobs, strict=True)]
        assert kept == [(token, pytest.approx(logprob)) for token, logprob in sampled[t.id]], t.id
        assert t.outcome.valid == (t.rewards is not None)
        assert t.outcome is Outcome.ABORTED or (t.error is None) == t.outcome.valid


@pytest.mark.parametrize(
    ("kind", "isolated", "rollouts", "groups"),
    [("sandboxes", False, 5, 10), ("servers", False, 3, 8), ("servers", True, 2, 8), ("programs", True, 2, 5)],
    ids=["sandboxes", "servers", "servers-in-sandboxes", "programs"],
)
def test_hundreds_of_trajectories_in_a_storm(kind, isolated, rollouts, groups, tmp_path, monkeypatch):
    open_to_all(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("whet.env.sampling.ABORT_GRACE_S", 0.5)
    make = environment(kind, isolated)
    before = Left(tmp_path)
    found, killed = storm(make, kind, rollouts, groups, seed=11)
    before.check()
    assert Counter(t.id for t in found) == dict.fromkeys((t.id for t in found), 1) and len(found) == rollouts * groups * 5
    outcomes = Counter(t.outcome for t in found)
    hung = {Outcome.TIMEOUT} if kind.startswith("servers") else set()  # elsewhere the storm may kill all that hangs
    assert set(outcomes) >= {Outcome.COMPLETED, Outcome.ENV_ERROR, Outcome.ABORTED} | hung, outcomes
    assert killed["processes"] > 0, killed
