"""What forest rows save: a forward and backward pass over groups of siblings, as a forest and as chains, in turn, on the same model.

    python benchmarks/forest_rows.py            # 3 million parameters
    python benchmarks/forest_rows.py 3M 38M

A group has 8 siblings that share a prompt and nothing else; their replies train. Figures go to benchmarks/results/forest_rows.json:
tokens of the samples per second, medians over the rounds; the tokens that went through the model; the median of each round's ratio.
The load of the machine tells how far it was busy with other things: the rounds alternate so that both kinds of rows meet the same.
"""

from __future__ import annotations

import json
import os
import sys
import time
from statistics import median

import torch
from machine import RESULTS, machine
from transformers import Qwen3Config

from whet.algo.sft import sft_loss
from whet.core.batch import TrainBatch, batch_of
from whet.core.weights import token_mean
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Origin, Sample

ROUNDS = 5
SIBLINGS = 8
VOCAB = 1024
SHAPES = {"3M": {"num_hidden_layers": 4, "hidden_size": 256}, "38M": {"num_hidden_layers": 12, "hidden_size": 512}}
RATIOS = {"8:1": (1024, 128), "1:1": (256, 256), "1:4": (96, 384)}
"""Tokens of prompt and reply, by their ratio."""
KINDS = ("chains", "forest")


def main(sizes: list[str]) -> None:
    before = os.getloadavg()[0]
    rows = [row(size, ratio) for size in sizes for ratio in RATIOS]
    command = " ".join(["python benchmarks/forest_rows.py", *sizes])
    load = {"before": before, "after": os.getloadavg()[0]}
    out = {"command": command, "machine": machine(), "load_1min": load, "rounds": ROUNDS, "siblings": SIBLINGS, "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "forest_rows.json").write_text(json.dumps(out, indent=1) + "\n")


def row(size: str, ratio: str) -> dict[str, object]:
    """One group, in turn as chains and as a forest; the first pass of each warms up."""
    batch = group(*RATIOS[ratio])
    backends = {kind: backend(size, kind) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    tokens = {kind: backends[kind].forward_backward(batch, sft_loss).num_tokens for kind in KINDS}
    for number in range(ROUNDS):
        for kind in KINDS if number % 2 else KINDS[::-1]:
            began = time.perf_counter()
            backends[kind].forward_backward(batch, sft_loss)
            seconds[kind].append(time.perf_counter() - began)
    found: dict[str, object] = {"size": size, "prompt:reply": ratio, "tokens": batch.num_tokens, "tokens_processed": tokens}
    found["tokens_per_second"] = {kind: round(batch.num_tokens / median(seconds[kind]), 1) for kind in KINDS}
    found["speedup"] = round(median(a / b for a, b in zip(seconds["chains"], seconds["forest"], strict=True)), 2)
    print(json.dumps(found))
    return found


def backend(size: str, kind: str) -> TorchBackend:
    shape = SHAPES[size]
    width = shape["hidden_size"]
    config = Qwen3Config(
        **shape, vocab_size=VOCAB, num_attention_heads=width // 64, num_key_value_heads=width // 128, head_dim=64,
        intermediate_size=2 * width, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    model = random_causal(config, ModelConfig(path=size, device="cpu"), seed=0)
    return TorchBackend(model, TrainConfig(rows=kind, max_tokens_per_device=16_384), total_steps=1)


def group(num_prompt: int, num_reply: int) -> TrainBatch:
    """Siblings with random replies."""
    generator = torch.Generator().manual_seed(num_prompt)
    prompt = torch.randint(VOCAB, (num_prompt,), generator=generator).tolist()
    samples = [
        Sample(
            tokens=(*prompt, *torch.randint(VOCAB, (num_reply,), generator=generator).tolist()),
            origin=(Origin.PROMPT,) * num_prompt + (Origin.MODEL,) * num_reply,
            loss_mask=(False,) * num_prompt + (True,) * num_reply,
            logprobs=(0.0,) * num_prompt + (-7.0,) * num_reply,
            versions=(-1,) * num_prompt + (0,) * num_reply,
            group="group",
            trajectory=f"group/{i}",
            order=0,
            reward=float(i),
            valid=True,
            temperature=1.0,
        )
        for i in range(SIBLINGS)
    ]
    batch = batch_of(samples)
    return batch.with_(weights=token_mean(batch))


if __name__ == "__main__":
    main(sys.argv[1:] or ["3M"])
