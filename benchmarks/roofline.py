"""How near each phase of a step comes to what the machine can do: matrix products and copies, measured, and the share that each reaches.

    python benchmarks/roofline.py 3M 38M

Work is counted from the model's shape: 2 operations per weight and token forward, 6 forward and backward (weights in matrix products; the
scores of attention are left out, so a share is a lower bound), 28 bytes per weight for AdamW's step in float32. Seconds are of the
processor (one thread), the least of the rounds, since other work on the machine adds to the rest. Figures go to
benchmarks/results/roofline.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch
from machine import RESULTS, machine
from rollout_peers import Models
from rollout_speed import SETTINGS, Setting

from whet.algo.sft import sft_loss
from whet.core.batch import batch_of
from whet.core.weights import token_mean
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Origin, Request, Sample, SamplingParams

ROUNDS = 3
NUM, LENGTH = 64, 128
"""Sequences, and tokens of each."""
DECODE_STEPS = 32
TRAINED = 16
"""Sequences of a forward and backward pass."""


def seconds_of(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Of the processor, the least of the rounds; the first call warms up."""
    work()
    found: list[float] = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def limits() -> dict[str, float]:
    """What the machine does at best on one thread."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    source = torch.randn(32 * 1024 * 1024)
    target = torch.empty_like(source)
    return {
        "matmul_gflops": round(2 * 1024**3 / seconds_of(lambda: a @ b, 20) / 1e9, 1),
        "copy_gb_per_s": round(2 * source.nbytes / seconds_of(lambda: target.copy_(source), 5) / 1e9, 1),
    }


def phases(setting: Setting, best: dict[str, float]) -> dict[str, dict[str, float]]:
    """Seconds, and shares of the best, by phase."""
    models = Models(setting.config())
    weights = sum(p.numel() for p in models.mine.hf.parameters())
    prompts = [tuple((7 * i + 3 * j) % setting.vocab for j in range(LENGTH)) for i in range(NUM)]
    origin, trains = (Origin.PROMPT,) + (Origin.MODEL,) * (LENGTH - 1), (False,) + (True,) * (LENGTH - 1)
    versions = (-1,) + (0,) * (LENGTH - 1)
    batch = batch_of([Sample(p, origin, trains, (0.0,) * LENGTH, versions, f"g{i}", f"g{i}") for i, p in enumerate(prompts[:TRAINED])])
    batch = batch.with_(weights=token_mean(batch))
    backend = TorchBackend(models.mine, TrainConfig(max_tokens_per_device=2048), total_steps=100)

    def decode(core: EngineCore) -> float:
        for i, prompt in enumerate(prompts):
            core.add(Request(str(i), prompt, SamplingParams(DECODE_STEPS + 8, 1.0, seed=i)))
        while min((s.num_sampled for s in core.scheduler.running), default=0) < 2 or core.scheduler.waiting:
            core.step()
        began = time.process_time()
        for _ in range(DECODE_STEPS):
            core.step()
        spent = time.process_time() - began
        core.forget()
        for sequence in [*core.scheduler.waiting]:
            core.finish(sequence)
        return spent / DECODE_STEPS

    core = EngineCore(models.mine, EmbeddedConfig(cache_tokens=65_536, block_size=16, max_running=128, max_batch_tokens=2048))

    def prefill() -> None:
        for prompt in prompts[:TRAINED]:
            core.score(prompt[: LENGTH - 4], 1.0)

    passed, stepped = [], []
    for _ in range(ROUNDS + 1):  # the first one warms up
        began = time.process_time()
        backend.forward_backward(batch, sft_loss)
        between = time.process_time()
        backend.optim_step()
        passed.append(between - began)
        stepped.append(time.process_time() - between)
    found = {
        f"decode step of {NUM} sequences": (min(decode(core) for _ in range(ROUNDS)), 2 * weights * NUM, 0),
        f"score of {TRAINED} texts of {LENGTH - 4} tokens, one by one": (seconds_of(prefill), 2 * weights * TRAINED * (LENGTH - 5), 0),
        f"forward and backward of {TRAINED * LENGTH} tokens": (min(passed[1:]), 6 * weights * TRAINED * LENGTH, 0),
        "optimizer step": (min(stepped[1:]), 0, 28 * weights),
    }
    return {
        name: {
            "seconds": round(seconds, 4),
            **({"share_of_matmul": round(flops / seconds / 1e9 / best["matmul_gflops"], 2)} if flops else {}),
            **({"share_of_copy": round(size / seconds / 1e9 / best["copy_gb_per_s"], 2)} if size else {}),
        }
        for name, (seconds, flops, size) in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="shares of the machine's best")
    parser.add_argument("setting", nargs="+", choices=["3M", "38M"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    before, best = os.getloadavg()[0], limits()
    found = {name: phases(SETTINGS[name], best) for name in args.setting}
    load = {"before": round(before, 1), "after": round(os.getloadavg()[0], 1)}
    command = " ".join(["python benchmarks/roofline.py", *args.setting])
    out = {"command": command, "machine": machine(), "load_1min": load, "limits": best, "phases": found}
    (RESULTS / "roofline.json").write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
