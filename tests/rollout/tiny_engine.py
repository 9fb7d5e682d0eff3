"""A real engine of a tiny model in float64, whose conversations have several turns, and every version's weights kept."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor
from transformers import Qwen3Config

from tests.rollout.scripted import RENDERER, STOP
from whet.data.parsers import Malformed, Parsed
from whet.data.template import Renderer
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.engine import EmbeddedEngine
from whet.model.attention import PackedRow
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.transport.apply import copy_weights
from whet.types import Message, Sample, ToolCall

EVERY = 6
"""One token in so many ends a turn: a random model's turns are short, and conversations have several."""
STOPS = (STOP, *range(EVERY, len(RENDERER.tokenizer), EVERY))
TEMPERATURE = 0.7


def parse_by_length(text: str) -> Parsed:
    """A random model writes no calls, so its texts stand for some: good ones, wrong ones, malformed ones, and none."""
    kind = len(text) % 4
    if kind == 0:
        return Parsed(Message("assistant", text))
    if kind == 1:
        return Parsed(Message("assistant", text), (Malformed("no call", 0),))
    call = ToolCall("calculator", {"expression": "12*3" if kind == 2 else "12**3"}, "call_0")
    return Parsed(Message("assistant", text, (call,)))


TURNS = Renderer(RENDERER.tokenizer, parse_by_length)


@cache
def tiny_model(whose: str) -> CausalModel:
    """One for each who asks; its first weights are `start()`, whatever it was given since."""
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(
        vocab_size=len(RENDERER.tokenizer), max_position_embeddings=1024, tie_word_embeddings=True, **shape, **heads
    )
    return random_causal(config, ModelConfig(path="tiny", device="cpu", dtype="float64"), seed=3)


@cache
def start() -> list[tuple[str, Tensor]]:
    return [(name, w.detach().clone()) for name, w in tiny_model("start").named_weights()]


@asynccontextmanager
async def tiny_engine() -> AsyncIterator[EmbeddedEngine]:
    with ThreadPoolExecutor(1) as thread:
        sizes = EmbeddedConfig(cache_tokens=4096, max_batch_tokens=256, own_weights=True)
        engine = EmbeddedEngine(tiny_model("engine"), sizes, thread, shares_weights=False, deterministic=False)
        try:
            yield engine
        finally:
            await engine.close()


@dataclass
class Policy:
    """The trainer's side: every version's weights, and what a plain forward pass with them gives."""

    moves: float = 0.1
    """How far an update goes; 0: nowhere."""
    model: CausalModel = field(default_factory=lambda: tiny_model("trainer"))
    versions: dict[int, list[tuple[str, Tensor]]] = field(default_factory=dict)

    def weights(self, version: int) -> list[tuple[str, Tensor]]:
        if version not in self.versions:
            draw = torch.Generator().manual_seed(version)
            before = self.versions[version - 1] if version else start()
            moved = [(name, w + self.moves * torch.randn(w.shape, generator=draw, dtype=w.dtype)) for name, w in before]
            self.versions[version] = moved if version else before
        return self.versions[version]

    def logprobs(self, samples: Sequence[Sample], version: int) -> list[Tensor]:
        """Of every token given what stands before it, without the first, under a version's weights."""
        copy_weights(dict(self.model.named_weights()), self.versions[version])
        lengths = [len(sample.tokens) for sample in samples]
        tokens = torch.tensor([token for sample in samples for token in sample.tokens])
        attend = PackedRow(lengths, torch.device("cpu"))
        with torch.no_grad():
            logits = self.model.logits(self.model.hidden(tokens, attend.positions, attend)) / TEMPERATURE
        table = torch.log_softmax(logits, -1)
        rows = zip(table.split(lengths), tokens.split(lengths), strict=True)
        return [row[:-1].gather(-1, its[1:, None]).squeeze(-1) for row, its in rows]
