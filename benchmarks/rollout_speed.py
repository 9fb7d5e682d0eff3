"""Tokens per second of sampling many replies at once: whet's embedded engine beside its peers, in alternating rounds on the same weights.

    python benchmarks/rollout_speed.py 3M                       # at most 5 rounds, no longer than 9 minutes
    python benchmarks/rollout_speed.py 3M --threads 2           # two cores for everybody
    python benchmarks/rollout_speed.py 38M --more --peers whet generate
    WHET_VLLM_PYTHON=/path/to/python python benchmarks/rollout_speed.py 3M      # vLLM, too, in that Python

Random weights of Qwen3's shape, float32. 8 prompts of 20 tokens with 8 samples each, up to 256 new tokens at temperature 1; one token of
the vocabulary ends a reply, so that lengths vary. "3M, one length" has no such token; 0.6B has 16 requests of 64 tokens. Only tokens up
to a reply's end count. whet also records each token's log-prob. Other work on the machine moves every figure: the rounds alternate, ratios
are taken within a round, the load average is told, and so are tokens per second of processor time, which a busy machine moves less. Figures
go to benchmarks/results/rollout_speed.json; `--more` keeps the rounds that are there and adds to them.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from machine import RESULTS, machine
from rollout_peers import PAGED, PEERS, WHET, Models, Work, config_of, took
from transformers import Qwen3Config
from vllm_peer import python

FILE = RESULTS / "rollout_speed.json"
LIMIT_S = 540
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Setting:
    """What is measured under a name."""

    layers: int
    hidden: int
    heads: int
    head_dim: int
    vocab: int
    num_prompts: int = 8
    samples: int = 8
    new_tokens: int = 256
    eos: bool = True
    rounds: int = 5

    def config(self) -> Qwen3Config:
        return config_of(self.layers, self.hidden, self.heads, self.head_dim, self.vocab)

    def work(self, new_tokens: int) -> Work:
        prompts = [tuple((7 * i + 3 * j) % 100 for j in range(20)) for i in range(self.num_prompts)]
        return Work(tuple(prompt for prompt in prompts for _ in range(self.samples)), new_tokens, self.eos)


SETTINGS = {
    "3M": Setting(4, 256, 4, 64, 100),
    "3M, one length": Setting(4, 256, 4, 64, 100, eos=False),
    "38M": Setting(12, 512, 8, 64, 100),
    "0.6B": Setting(28, 1024, 16, 128, 151_936, num_prompts=16, samples=1, new_tokens=64, eos=False, rounds=3),
}
TOLD = {
    "whet": f"EmbeddedEngine through its event loop, started once, its cache given up before each round, {WHET.model_dump()}",
    "whet, 2 copies": "the same in two processes (engine.embedded.copies), half of the threads each",
    "transformers generate, dynamic cache": "sdpa, one padded batch, the default cache",
    "transformers generate, static cache": "sdpa, one padded batch, cache_implementation='static', not compiled",
    "transformers continuous batching": f"generate_batch, sdpa, {PAGED}",
    "bare loop": "eager torch for this one shape of work (rollout_peers.bare_loop): what a step costs at least",
    "vllm, eager": "LLM.generate in a process of its own, float32, max_num_seqs=128, 2 GiB of cache, enforce_eager",
    "vllm, compiled": "the same with torch.compile, vLLM's default",
}
VLLM = ("vllm, eager", "vllm, compiled")


def measure(name: str, models: Models, peers: list[str], rounds: list[dict[str, Any]], count: int) -> None:
    """Add rounds to `rounds`, as many as fit in the time."""
    setting, began = SETTINGS[name], time.monotonic()
    for peer in peers:
        took(peer, models, setting.work(WARM_UP_TOKENS))
    last = 0.0
    for _ in range(count):
        started = time.monotonic()
        if started - began + last > LIMIT_S:
            return
        wall: dict[str, float] = {}
        processor: dict[str, float] = {}
        load = os.getloadavg()[0]
        for peer in peers:
            found = took(peer, models, setting.work(setting.new_tokens))
            wall[peer] = round(found.tokens / found.seconds, 2)
            if peer != "whet, 2 copies":  # whose work is done by other processes
                processor[peer] = round(found.tokens / found.processor, 2)
        rounds.append({"load_average": round(load, 1), "tokens_per_second": wall, "tokens_per_processor_second": processor})
        print(name, rounds[-1], flush=True)
        last = time.monotonic() - started


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds, and of the rounds' ratios."""
    kinds = ("tokens_per_second", "tokens_per_processor_second")
    return {kind: _compared([found[kind] for found in rounds if kind in found]) for kind in kinds}


def _compared(speeds: list[dict[str, float]]) -> dict[str, Any]:
    peers = sorted({peer for found in speeds for peer in found})
    mine, others = [peer for peer in peers if peer.startswith("whet")], [peer for peer in peers if not peer.startswith("whet")]
    over = {
        f"{name} over {peer}": [found[name] / found[peer] for found in speeds if name in found and peer in found]
        for name in mine
        for peer in others
    }
    return {
        "median": {peer: round(median(found[peer] for found in speeds if peer in found), 1) for peer in peers},
        "ratios": {
            pair: {"median": round(median(ratios), 2), "least": round(min(ratios), 2), "most": round(max(ratios), 2), "rounds": len(ratios)}
            for pair, ratios in over.items()
            if ratios
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="sampling speed, side by side")
    parser.add_argument("setting", nargs="+", choices=list(SETTINGS))
    everybody = [*PEERS, *(VLLM if python() else ())]
    parser.add_argument("--peers", nargs="+", default=everybody, help="parts of names; whet is always there")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--more", action="store_true", help="keep the rounds that the file has")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    peers = [name for name in everybody if name == "whet" or any(part in name for part in args.peers)]
    for name in args.setting:
        key = name if args.threads == 1 else f"{name}, {args.threads} threads"
        rounds = _found()[key]["rounds"] if args.more and key in _found() else []
        with closing(Models(SETTINGS[name].config())) as models:
            measure(name, models, peers, rounds, args.rounds or SETTINGS[name].rounds)
        settings = _found() | {key: {"machine": machine(), **summary(rounds), "rounds": rounds}}
        out = {"command": "python benchmarks/rollout_speed.py SETTING", "peers": TOLD, "settings": settings}
        FILE.write_text(json.dumps(out, indent=1) + "\n")
        print(json.dumps(summary(rounds), indent=1))


def _found() -> dict[str, Any]:
    return json.loads(FILE.read_text())["settings"] if FILE.exists() else {}


if __name__ == "__main__":
    main()
