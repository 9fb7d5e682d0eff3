"""Tokens per second of a forward and backward pass: whet's packed rows beside transformers' padded batches, in alternating rounds.

    python benchmarks/train_speed.py 3M 38M

The same weights (Qwen3's shape, float32), the same 64 samples: 8 prompts of 20 tokens with 8 replies each, as long as those of a policy
that ends with one token in a hundred, 256 at most. The loss is the mean over reply tokens; both leave the same gradient, which is
checked. whet packs rows of at most 4096 tokens (`train.rows = "auto"`); transformers (sdpa) gets batches of 16, padded to their longest, as
they come and sorted by length. Only the samples' own tokens count. Figures go to benchmarks/results/train_speed.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from machine import RESULTS, machine
from rollout_speed import SETTINGS
from transformers import AutoModelForCausalLM, PreTrainedModel

from whet.algo.sft import sft_loss
from whet.core.batch import batch_of
from whet.core.weights import token_mean
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Origin, Sample

FILE = RESULTS / "train_speed.json"
PROMPT, LONGEST, END = 20, 256, 0.01
PADDED = 16
"""Samples of a padded batch."""


def texts() -> list[tuple[int, ...]]:
    """Prompts with replies, prompts first."""
    rng = random.Random(0)
    out: list[tuple[int, ...]] = []
    for i in range(64):
        length = min(LONGEST, 1 + int(rng.expovariate(END)))
        out.append((*((7 * (i // 8) + 3 * j) % 100 for j in range(PROMPT)), *(rng.randrange(100) for _ in range(length))))
    return out


def packed(backend: TorchBackend, tokens: list[tuple[int, ...]]) -> Callable[[], object]:
    """whet's pass over all samples."""
    samples: list[Sample] = []
    for i, text in enumerate(tokens):
        reply = len(text) - PROMPT
        origin = (Origin.PROMPT,) * PROMPT + (Origin.MODEL,) * reply
        trains = (False,) * PROMPT + (True,) * reply
        versions = (-1,) * PROMPT + (0,) * reply
        samples.append(Sample(text, origin, trains, (0.0,) * len(text), versions, f"g{i // 8}", f"g{i}"))
    batch = batch_of(samples)
    batch = batch.with_(weights=token_mean(batch))
    return lambda: backend.forward_backward(batch, sft_loss)


def padded(model: PreTrainedModel, tokens: list[tuple[int, ...]]) -> Callable[[], object]:
    """transformers' pass, `PADDED` samples at a time."""
    total = sum(len(text) - PROMPT for text in tokens)
    batches: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for first in range(0, len(tokens), PADDED):
        part = tokens[first : first + PADDED]
        width = max(map(len, part))
        ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in part])
        places, lengths = torch.arange(width), torch.tensor([[len(text)] for text in part])
        batches.append((ids, (places < lengths).long(), torch.where((places >= PROMPT) & (places < lengths), ids, -100)))

    def run() -> None:
        for ids, mask, labels in batches:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            (F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / total).backward()

    return run


def measure(size: str, count: int) -> dict[str, Any]:
    config = SETTINGS[size].config()
    mine = random_causal(config, ModelConfig(path="", device="cpu"), seed=0)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="sdpa").eval()
    plain.load_state_dict(mine.hf.state_dict())
    tokens = texts()
    passes = {
        "whet": packed(TorchBackend(mine, TrainConfig(max_tokens_per_device=4096), total_steps=1), tokens),
        "transformers, padded": padded(plain, tokens),
        "transformers, padded, sorted by length": padded(plain, sorted(tokens, key=len)),
    }
    for who, run in passes.items():  # warms up, and leaves gradients to compare
        plain.zero_grad()
        run()
        if who != "whet":
            check_gradients(mine.hf, plain)
    num, rounds = sum(map(len, tokens)), []
    for _ in range(count):
        load, speeds = round(os.getloadavg()[0], 1), {}
        for who, run in passes.items():
            began = time.perf_counter()
            run()
            speeds[who] = round(num / (time.perf_counter() - began), 1)
        rounds.append({"load_average": load, "tokens_per_second": speeds})
        print(size, rounds[-1], flush=True)
    found = [each["tokens_per_second"] for each in rounds]
    ratios = {who: [speeds["whet"] / speeds[who] for speeds in found] for who in passes if who != "whet"}
    return {
        "tokens": num,
        "median": {who: median(speeds[who] for speeds in found) for who in passes},
        "whet_over": {
            who: {kind: round(of(each), 2) for kind, of in (("median", median), ("least", min), ("most", max))}
            for who, each in ratios.items()
        },
        "rounds": rounds,
    }


def check_gradients(mine: PreTrainedModel, theirs: PreTrainedModel) -> None:
    """Both have just made their first."""
    other = dict(theirs.named_parameters())
    for name, parameter in mine.named_parameters():
        found, expected = parameter.grad, other[name].grad
        assert found is not None and expected is not None, name
        distance = float((found - expected).norm() / expected.norm())
        assert distance < 1e-3, f"{name}: the gradients differ by {distance:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description="training speed, side by side")
    parser.add_argument("size", nargs="+", choices=["3M", "38M"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for size in args.size:
        found = {"machine": machine(), **measure(size, args.rounds)}
        sizes = (json.loads(FILE.read_text())["sizes"] if FILE.exists() else {}) | {size: found}
        FILE.write_text(json.dumps({"command": "python benchmarks/train_speed.py SIZE", "sizes": sizes}, indent=1) + "\n")
        print(json.dumps({key: found[key] for key in ("median", "whet_over")}, indent=1))


if __name__ == "__main__":
    main()
