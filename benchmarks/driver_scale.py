"""Cost of the controller's own work for each token, from an engine's chunks to the rows that the trainer computes, records included.

    python benchmarks/driver_scale.py                  # 1, 8 and 67 million tokens, and 8,192 trajectories through the scheduler
    python benchmarks/driver_scale.py --tokens 1000000 --profile 25

The engine hands over chunks that are there already, and the tokenizer says nothing: neither is the controller's work. Tokens are drawn
at random, log-probs, too (the worst case for compression). Each size runs in a process of its own with one thread; seconds are CPU
seconds of all its threads, bytes are the growth of its resident memory at the highest, less the raw columns (8 bytes a token: an id and
a log-prob). Figures go to benchmarks/results/driver_scale.json.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from machine import RESULTS, machine

from whet.background import collect_less
from whet.core.batch import TrainBatch, batch_of
from whet.data.parsers import Parsed
from whet.data.template import Renderer
from whet.engine.base import Engine
from whet.env.base import EnvFactory, Step
from whet.env.limits import Limits
from whet.observe.records import RecordWriter
from whet.observe.records.numbers import RolloutNumbers
from whet.observe.records.schema import USE
from whet.rollout.control import ControlConfig
from whet.rollout.recipe import Recipe
from whet.rollout.runner import TrajectoryRunner
from whet.rollout.scheduler import Rollouts, RolloutSpec
from whet.train.torch_native.layout import RowTurn, lay_out, micro_batches, plan_rows
from whet.types import Chunk, Finish, Message, Progress, Request, Rewards, SamplingParams, Task, Trajectory
from whet.types.columns import Floats, Ints

SIZES = (1_000_000, 8_000_000, 67_000_000)
NUM_TRAJECTORIES = 8192
PER_TRAJECTORY = 8192
"""Tokens of a trajectory."""
TURNS = 4
PROMPT, ANSWER, CHUNK = 512, 128, 512
"""Tokens of a prompt, of the environment's answer, and of a chunk."""
SIBLINGS = 8
ROW_TOKENS = 32768
RAW_BYTES = 8


class World:
    """Contexts and chunks that are there before the clock runs."""

    def __init__(self, per_trajectory: int) -> None:
        draw = np.random.default_rng(0)
        self.sampled = (per_trajectory - PROMPT - (TURNS - 1) * ANSWER) // TURNS
        ids = draw.integers(1, 150_000, 1 << 20, dtype=np.int32)
        logprobs = -draw.exponential(1.0, 1 << 20).astype(np.float32)
        starts = draw.integers(0, (1 << 20) - PROMPT - CHUNK, 1 << 16)
        self._chunks = {
            (length, finish): [Chunk(Ints(ids[s : s + length]), Floats(logprobs[s : s + length]), 0, finish) for s in starts[: 1 << 12]]
            for length, finish in ((CHUNK, None), (self.sampled % CHUNK or CHUNK, Finish.STOP))
        }
        self._contexts = {n: [Ints(ids[s : s + n]) for s in starts[: 1 << 12]] for n in (PROMPT, ANSWER)}
        self._next = 0

    def chunks(self) -> Iterator[Chunk]:
        """Of one turn."""
        for left in range(self.sampled, 0, -CHUNK):
            self._next += 1
            yield self._chunks[(CHUNK, None) if left > CHUNK else (left, Finish.STOP)][self._next % (1 << 12)]

    def context(self, key: int, length: int) -> Ints:
        return self._contexts[length][key % (1 << 12)]


class ReadyEngine:
    """Hands over what is there."""

    version = 0

    def __init__(self, world: World) -> None:
        self._world = world

    def open(self, conversation: str) -> None:
        pass

    def release(self, conversation: str) -> None:
        pass

    async def busy_s(self) -> float:
        return 0.0

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        for chunk in self._world.chunks():
            await asyncio.sleep(0)
            yield chunk


class SilentRenderer:
    """Contexts without a tokenizer."""

    num_spelled = 0
    strips = False

    def __init__(self, world: World) -> None:
        self._world = world

    def prompt(self, task: Task, tools: object) -> Ints:
        return self._world.context(int(task.id), PROMPT)

    def plain(self, text: str, after: object) -> Ints:
        return self._world.context(len(text), ANSWER)

    def decode(self, tokens: object) -> str:
        return ""

    def parse(self, tokens: object, tools: object = (), prompt: object = ()) -> Parsed:
        return Parsed(Message("assistant", ""))


class Turns:
    """Answers until the turns are over."""

    tools = ()

    def __init__(self) -> None:
        self._left = TURNS

    async def start(self, task: Task) -> Task:
        return task

    async def step(self, reply: Parsed) -> Step:
        self._left -= 1
        return Step(text="answer") if self._left else Step(done=True)

    async def close(self) -> None:
        pass


class Source:
    """Tasks without a content."""

    epoch = 0

    def __init__(self) -> None:
        self._next = 0

    def next(self, n: int) -> list[Task]:
        self._next += n
        return [Task(str(i), "") for i in range(self._next - n, self._next)]


async def reward(trajectory: Trajectory) -> Rewards:
    return Rewards(float(len(trajectory.id) % 2))


def rollouts(world: World, groups: int, per_trajectory: int) -> Rollouts:
    runner = TrajectoryRunner(
        engine=cast(Engine, ReadyEngine(world)),
        renderer=cast(Renderer, SilentRenderer(world)),
        make_env=EnvFactory(Turns),
        reward=reward,
        sampling=SamplingParams(per_trajectory),
        limits=Limits(max_tokens=2 * per_trajectory, max_turn_tokens=per_trajectory, max_turns=TURNS + 1),
        timeout_s=None,
        chunk_tokens=CHUNK,
    )
    return Rollouts(cast(Any, Source()), runner, ControlConfig(), RolloutSpec(groups, SIBLINGS), 1, 0)


class Stages:
    """CPU seconds and the growth of memory of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.system: dict[str, float] = {}
        """The kernel's part of the seconds: new pages of memory, and copies to the disk's cache."""
        self.bytes: dict[str, int] = {}
        gc.collect()
        self._base = _resident()

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        began = os.times()
        out = work()
        ended = os.times()
        self.system[name] = ended.system - began.system
        self.seconds[name] = ended.user - began.user + self.system[name]
        self.bytes[name] = _peak() - self._base
        return out


def measure(num_tokens: int) -> dict[str, Any]:
    """All stages for about so many tokens."""
    groups = max(1, round(num_tokens / PER_TRAJECTORY / SIBLINGS))
    world = World(PER_TRAJECTORY)
    _go_once(world)
    stages = Stages()
    taken = stages.run("scheduler and trajectories", lambda: _played(world, groups, PER_TRAJECTORY))
    samples = stages.run("samples", lambda: Recipe("model", 4, "mask").samples(taken.groups, 0)[0])
    batch: TrainBatch = stages.run("batch", lambda: batch_of(samples))
    credited = batch.with_(advantages=torch.zeros(batch.num_tokens), weights=torch.ones(batch.num_tokens))
    stages.run("rows", lambda: _rows(credited))
    with tempfile.TemporaryDirectory() as folder:
        numbers = _numbers(batch.num_tokens)
        arrays = {id(values): values.nbytes for values in numbers.columns.values()}
        stages.run("records", lambda: RecordWriter(Path(folder)).write(0, taken.groups, samples, numbers))
        record_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    count = batch.num_tokens
    stages.bytes["records"] -= sum(arrays.values())
    return {
        "tokens": count,
        "trajectories": groups * SIBLINGS,
        "us_per_token": {name: 1e6 * seconds / count for name, seconds in stages.seconds.items()},
        "kernel_us_per_token": {name: 1e6 * seconds / count for name, seconds in stages.system.items()},
        "total_us_per_token": 1e6 * sum(stages.seconds.values()) / count,
        "bytes_per_token": {name: size / count - RAW_BYTES for name, size in stages.bytes.items()},
        "peak_gb": _peak() / 1e9,
        "record_bytes_per_token": record_bytes / count,
    }


def _go_once(world: World) -> None:
    """Lay out one sample and write the record of one group, so that all code is in memory."""
    taken = _played(world, 1, PER_TRAJECTORY)
    samples = Recipe("model", 4, "mask").samples(taken.groups, 0)[0]
    _rows(batch_of(samples[:1]))
    with tempfile.TemporaryDirectory() as folder:
        RecordWriter(Path(folder)).write(0, taken.groups, samples, _numbers(batch_of(samples).num_tokens))


def _played(world: World, groups: int, per_trajectory: int) -> Any:
    """Groups of a rollout. They are no result of `asyncio.run`, which writes its result out as text."""
    taken: list[Any] = []

    async def take() -> None:
        taken.append(await rollouts(world, groups, per_trajectory).take(Progress()))

    asyncio.run(take())
    return taken[0]


def _rows(batch: TrainBatch) -> None:
    cpu = torch.device("cpu")
    plan = plan_rows(batch, "chains", ROW_TOKENS)
    turns = [RowTurn(row) for row in plan.rows]
    for _ in micro_batches(batch, turns, lambda part: lay_out(part, plan.kind, cpu, torch.float32), cpu, projects=True):
        pass


def _numbers(num_tokens: int) -> RolloutNumbers:
    """What a step of GRPO with a reference leaves for the records. The backend has these arrays already."""
    draw = np.random.default_rng(1)
    some = [draw.standard_normal(num_tokens, dtype=np.float32) for _ in range(4)]
    whole = {"first_clip": np.zeros(num_tokens, np.float32), "first_ranks": np.zeros(num_tokens, np.float32)}
    names = ["advantages", "old_logprobs", "train_logprobs", "ref_logprobs", *(f"first_{name}" for name in USE)]
    return RolloutNumbers({**{name: some[i % 4] for i, name in enumerate(names)}, **whole})


def scheduled() -> dict[str, float]:
    """CPU milliseconds of a trajectory of few tokens, 8,192 of them at once."""
    length = PROMPT + TURNS * 160
    world = World(length)
    began = time.process_time()
    taken = _played(world, NUM_TRAJECTORIES // SIBLINGS, length)
    seconds = time.process_time() - began
    assert sum(len(group.trajectories) for group in taken.groups) == NUM_TRAJECTORIES
    return {"trajectories": NUM_TRAJECTORIES, "turns": TURNS, "ms_per_trajectory": 1e3 * seconds / NUM_TRAJECTORIES}


def _peak() -> int:
    return _status("VmHWM")


def _resident() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, help="this size alone, in this process; 0: the scheduler")
    parser.add_argument("--profile", type=int, default=0, help="print so many lines of a profile")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    collect_less()
    if asked.tokens is not None:
        profile = cProfile.Profile()
        if asked.profile:
            profile.enable()
        found = measure(asked.tokens) if asked.tokens else scheduled()
        profile.disable()
        print(json.dumps(found))
        if asked.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(asked.profile)
        return
    out: dict[str, Any] = {"command": "python benchmarks/driver_scale.py", "machine": machine(), "sizes": []}
    for size in SIZES:
        out["sizes"].append(_alone(size))
        print(json.dumps(out["sizes"][-1]), flush=True)
    out["scheduler"] = _alone(0)
    print(json.dumps(out["scheduler"]))
    (RESULTS / "driver_scale.json").write_text(json.dumps(out, indent=1) + "\n")


def _alone(size: int) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, __file__, "--tokens", str(size)], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
