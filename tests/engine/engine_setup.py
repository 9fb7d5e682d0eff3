"""What the engine's tests share: tiny models, plain transformers as the reference, and engines that always end."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.engine import EmbeddedEngine
from whet.engine.embedded.grammar import Grammars
from whet.engine.embedded.stops import Decode
from whet.engine.embedded.tokenizer import EngineTokenizer
from whet.engine.workers.dialing import Invitation
from whet.engine.workers.launch import LocalWorker
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.types import Chunk, Finish, Request

VOCAB = 97
DEADLINE_S = 60
DEVICE = os.environ.get("WHET_TEST_DEVICE", "cpu")
"""Where the models of `tiny` lie; those of `plain` are on the CPU."""

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,  # far from uniform, so that the most likely token is clear
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DIALS = (
    "import sys; from whet.engine.workers.worker import dial; from whet.engine.workers.dialing import Invitation;"
    "dial(Invitation(sys.argv[1], int(sys.argv[2]), sys.stdin.buffer.read(), 60.0))"
)
CONFIGS = {
    "qwen3": lambda: Qwen3Config(head_dim=16, **SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "small": lambda: Qwen3Config(head_dim=8, **(SHAPE | {"hidden_size": 32, "num_hidden_layers": 1})),
    "llama": lambda: LlamaConfig(**(SHAPE | {"num_hidden_layers": 3, "num_key_value_heads": 4})),
}


ROUNDED = 2**-24
"""Log-probs that an engine hands over are of 32 bits, whatever it computes in: the relative error of one rounding."""


@cache
def tiny(kind: str = "qwen3", dtype: str = "float64", seed: int = 0) -> CausalModel:
    """A random model; shared by tests, so never write to its weights."""
    return random_causal(CONFIGS[kind](), ModelConfig(path="", dtype=dtype, device=DEVICE), seed=seed)


@cache
def plain(kind: str = "qwen3", dtype: str = "float64", seed: int = 0) -> PreTrainedModel:
    """The same weights in a model of transformers alone (its eager attention rounds to float32, so not that one)."""
    hf = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="sdpa", dtype=getattr(torch, dtype))
    hf.load_state_dict(tiny(kind, dtype, seed).hf.state_dict())
    return hf.eval()


@torch.no_grad()
def plain_logprobs(hf: PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """Log-probs of every next token at temperature 1. [T, V]"""
    return torch.log_softmax(hf(input_ids=torch.tensor([tokens]), use_cache=False).logits[0], -1)


def engine_of(
    model: CausalModel,
    *,
    deterministic: bool = False,
    shares: bool = True,
    decode: Decode | None = None,
    grammars: Grammars | None = None,
    **sizes: int,
) -> EmbeddedEngine:
    """An engine with its own thread, small unless told otherwise."""
    config = EmbeddedConfig(**({"cache_tokens": 2048, "block_size": 4, "max_running": 32, "max_batch_tokens": 256} | sizes))
    thread = ThreadPoolExecutor(1, "engine-test")
    tokenizer = EngineTokenizer(decode, grammars)
    return EmbeddedEngine(model, config, thread, shares_weights=shares, deterministic=deterministic, tokenizer=tokenizer)


@dataclass(frozen=True)
class Reply:
    """All chunks of a request, joined."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish: Finish | None
    chunks: tuple[Chunk, ...]


async def reply_to(engine: EmbeddedEngine, request: Request) -> Reply:
    chunks = [chunk async for chunk in engine.generate(request)]
    assert [chunk.finish is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    return Reply(
        tuple(t for c in chunks for t in c.tokens),
        tuple(x for c in chunks for x in c.logprobs),
        tuple(c.version for c in chunks for _ in c.tokens),
        chunks[-1].finish,
        tuple(chunks),
    )


def serve(engine: EmbeddedEngine, play) -> object:
    """Run the coroutine function `play` with a deadline, then close the engine and see that nothing is left of it."""

    async def bounded() -> object:
        try:
            return await asyncio.wait_for(play(), DEADLINE_S)
        finally:
            await engine.close()

    try:
        result = asyncio.run(bounded())
    finally:
        engine._runner._thread.shutdown()
    assert_empty(engine)
    return result


def serve_all(engine: EmbeddedEngine, requests: list[Request]) -> dict[str, Reply]:
    """Every request at once."""

    async def play() -> dict[str, Reply]:
        replies = await asyncio.gather(*(reply_to(engine, request) for request in requests))
        return {request.id: reply for request, reply in zip(requests, replies, strict=True)}

    return serve(engine, play)  # type: ignore[return-value]


def assert_empty(engine: EmbeddedEngine) -> None:
    """Nothing runs, nothing waits, and every block came back."""
    scheduler = engine.core.scheduler
    assert not scheduler.running and not scheduler.waiting and not engine._calls
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert set(scheduler.pool._holders) == {0}


def elsewhere(name: str, invitation: Invitation, script: str = DIALS, key: bytes | None = None) -> LocalWorker:
    """A process that was started by somebody else, who passed the invitation on."""
    arguments = [sys.executable, "-c", script, invitation.host, str(invitation.port)]
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it may have ended by itself
        child.stdin.write(invitation.key if key is None else key)
        child.stdin.close()
    return LocalWorker(name, child)
