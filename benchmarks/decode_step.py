"""Where a decode step's time goes: each part's time with 1, 20 and 64 sequences running, in torch and compiled.

    python benchmarks/decode_step.py 3M 38M             # sequences of about 170 tokens
    python benchmarks/decode_step.py 3M --threads 2

Random weights of Qwen3's shape, float32, the settings of `rollout_speed.py`. Steps run without the event loop. With one thread the
parts are processor time of that thread; with several, wall time. Figures go to benchmarks/results/decode_step.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from machine import RESULTS, machine
from rollout_peers import WHET, Models
from rollout_speed import SETTINGS
from torch import nn

from whet.engine.embedded import core as engine_core
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.paged import PagedAttend
from whet.types import Request, SamplingParams

FILE = RESULTS / "decode_step.json"
NUMBERS = (1, 20, 64)
BEFORE, STEPS = 128, 32
"""Tokens sampled before the clock starts, and steps that it runs."""


class Clock:
    """Time by part; a part within another is taken off it."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.parts: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                whole = self.now() - began
                self.parts[part] += whole - self._inner.pop()
                self._inner[-1] += whole

        return call


def instrument(core: EngineCore, clock: Clock) -> None:
    """Time the parts of a core's steps."""
    for name, module in core.model.hf.named_modules():
        if isinstance(module, nn.Linear):
            module.forward = clock.timed("logits" if name.endswith("lm_head") else "projections", module.forward)
        elif "Norm" in type(module).__name__ or "Rotary" in type(module).__name__ or name.endswith("act_fn"):
            module.forward = clock.timed("norms, rotary table, activation", module.forward)
    for name, part in (("sample", "sampling"), ("buckets", "planning"), ("lay_out", "planning")):
        setattr(engine_core, name, clock.timed(part, getattr(engine_core, name)))
    core.scheduler.plan = clock.timed("planning", core.scheduler.plan)
    core.scheduler.advance = clock.timed("bookkeeping", core.scheduler.advance)
    core._append = clock.timed("bookkeeping", core._append)
    core.model.hidden = clock.timed("rest of the model: rotation, residuals, calls", core.model.hidden)
    PagedAttend.__call__ = clock.timed("attention, cache written and read", PagedAttend.__call__)
    if core._native is not None:
        native = core._native
        native._library = Timed(native._library, clock)
        native.hidden = clock.timed("compiled step: its tables and addresses", native.hidden)
        native.logits = clock.timed("compiled logits: memory and addresses", native.logits)


class Timed:
    """The compiled library with its step and its logits timed."""

    def __init__(self, library: Any, clock: Clock) -> None:
        self.decode_scratch_floats = library.decode_scratch_floats
        self.decode_step = clock.timed("compiled step", library.decode_step)
        self.decode_logits = clock.timed("logits", library.decode_logits)


def core_of(models: Models, num: int, compiled: bool) -> EngineCore:
    """A core with so many sequences in the middle of their replies."""
    core = EngineCore(models.mine, WHET.model_copy(update={"compiled": compiled}))
    for i in range(num):
        prompt = tuple((7 * (i % 8) + 3 * j) % 100 for j in range(20))
        core.add(Request(str(i), prompt, SamplingParams(BEFORE + 2 * STEPS, 1.0, seed=i), str(i)))
    while min(s.num_sampled for s in core.scheduler.running + core.scheduler.waiting) < BEFORE:
        core.step()
    return core


def profile(size: str, num: int, threads: int, compiled: bool) -> dict[str, float]:
    """Milliseconds a step by part, and of a whole step without the parts' clocks."""
    models = Models(SETTINGS[size].config())
    kept = [(owner, name, getattr(owner, name)) for owner, name in PATCHED]
    now = time.thread_time if threads == 1 else time.perf_counter
    core = core_of(models, num, compiled)
    began = now()
    for _ in range(STEPS):
        core.step()
    bare = now() - began
    core = core_of(models, num, compiled)
    clock = Clock(now)
    instrument(core, clock)
    step = clock.timed("rest of the step", core.step)
    for _ in range(STEPS):
        step()
    for owner, name, function in kept:
        setattr(owner, name, function)
    out = {part: round(1000 * spent / STEPS, 3) for part, spent in sorted(clock.parts.items(), key=lambda item: -item[1])}
    return {"whole step": round(1000 * bare / STEPS, 3)} | out


PATCHED = ((engine_core, "sample"), (engine_core, "buckets"), (engine_core, "lay_out"), (PagedAttend, "__call__"))


def main() -> None:
    parser = argparse.ArgumentParser(description="the parts of a decode step")
    parser.add_argument("size", nargs="+", choices=list(SETTINGS))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for size in args.size:
        found: dict[str, Any] = {"machine": machine(), "load_average": round(os.getloadavg()[0], 1)}
        for num in NUMBERS:
            found[f"{num} sequences"] = {
                how: profile(size, num, args.threads, how == "compiled, ms") for how in ("torch, ms", "compiled, ms")
            }
        key = size if args.threads == 1 else f"{size}, {args.threads} threads"
        print(key, json.dumps(found, indent=1), flush=True)
        sizes = (json.loads(FILE.read_text())["sizes"] if FILE.exists() else {}) | {key: found}
        FILE.write_text(json.dumps({"command": "python benchmarks/decode_step.py SIZE", "sizes": sizes}, indent=1) + "\n")


if __name__ == "__main__":
    main()
