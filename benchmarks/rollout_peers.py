"""Who is compared in `rollout_speed.py`: each samples a reply to every prompt and says how many tokens it sampled.

All of them hold the same tensors, so that none has better memory than another.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen3Config
from vllm_peer import Took, Vllm

from whet.engine.base import Engine
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.engine import EmbeddedEngine
from whet.engine.workers.copies import EngineCopies
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.types import Request, SamplingParams

EOS = 5
WHET = EmbeddedConfig()
PAGED = {"page_size": 16, "num_blocks": 4096, "max_batch_tokens": 1024, "max_memory_percent": 0.5}
"""Continuous batching measures free GPU memory to find its sizes; on a CPU they are told."""


@dataclass(frozen=True)
class Work:
    """What is to be sampled, at temperature 1 from the whole vocabulary."""

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    """At most, or exactly where `eos` is off."""
    eos: bool
    """Whether `EOS` ends a reply."""


def config_of(layers: int, hidden: int, heads: int, head_dim: int, vocab: int) -> Qwen3Config:
    """Qwen3: two query heads per key-value head, MLPs of three times the hidden size, tied embeddings."""
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_dim,
        intermediate_size=3 * hidden,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


class Models:
    """Random weights, as whet holds them and as plain transformers does."""

    def __init__(self, config: Qwen3Config) -> None:
        self.config = copy.deepcopy(config)
        self.mine: CausalModel = random_causal(config, ModelConfig(path="", device="cpu"), seed=0)
        with torch.device("meta"):
            own = copy.deepcopy(config)  # a model keeps the configuration it is given, and notes in it how it attends
            self.plain: PreTrainedModel = AutoModelForCausalLM.from_config(own, attn_implementation="sdpa")
        self.plain.load_state_dict(self.mine.hf.state_dict(), assign=True)
        self.plain.tie_weights()
        self.plain.model.rotary_emb = self.mine.hf.model.rotary_emb
        self.plain.requires_grad_(False).eval()
        self.engine: EmbeddedEngine | None = None
        self.thread = ThreadPoolExecutor(1)
        self.copies: EngineCopies | None = None
        self.vllm: dict[bool, Vllm] = {}

    def close(self) -> None:
        if self.engine is not None:
            asyncio.run(self.engine.close())
        self.thread.shutdown()
        if self.copies is not None:
            self.copies.end()
        for engine in self.vllm.values():
            engine.close()


def whet(models: Models, work: Work) -> int:
    """The embedded engine as a run uses it, event loop and thread included; started once."""
    if models.engine is None:
        models.engine = EmbeddedEngine(models.mine, WHET, models.thread, shares_weights=True, deterministic=False)
    return asyncio.run(_sampled(models.engine, work))


def whet_copies(models: Models, work: Work) -> int:
    """Two copies of the engine in processes of their own, which are started once."""
    if models.copies is None:
        own = random_causal(models.config, ModelConfig(path="", device="cpu"), seed=0)
        models.copies = EngineCopies(own, WHET.model_copy(update={"copies": 2}), deterministic=False)
    return asyncio.run(_sampled(models.copies, work))


async def _sampled(engine: Engine, work: Work) -> int:
    """Tokens that an engine samples, which knows no prompt from before."""
    stops = (EOS,) if work.eos else ()

    async def reply(number: int, prompt: tuple[int, ...]) -> int:
        sampling = SamplingParams(work.new_tokens, 1.0, seed=number, stop_token_ids=stops)
        request = Request(str(number), prompt, sampling, str(number))
        return sum([len(chunk.tokens) async for chunk in engine.generate(request)])

    await engine.flush()
    return sum(await asyncio.gather(*(reply(i, prompt) for i, prompt in enumerate(work.prompts))))


def generate(models: Models, work: Work, **cache: str) -> int:
    """transformers' generate: a reply that has ended is padded until the last one ends; only what comes up to its end counts."""
    ids = torch.tensor(work.prompts)
    length = {"max_new_tokens": work.new_tokens, "min_new_tokens": 0 if work.eos else work.new_tokens}
    with torch.inference_mode():
        out = models.plain.generate(  # pyright: ignore[reportCallIssue]
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            eos_token_id=EOS if work.eos else None,
            disable_compile=True,  # static shapes compile on request only; on a CPU it takes a compiler
            **length,
            **cache,
        )
    return _count(out[:, ids.shape[1] :], work)


def continuous_batching(models: Models, work: Work) -> int:
    """transformers' continuous batching, its cache of the same size as whet's."""
    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        max_new_tokens=work.new_tokens,
        eos_token_id=EOS if work.eos else -1,
        pad_token_id=0,
    )
    models.plain.set_attn_implementation("paged|sdpa")
    try:
        found = models.plain.generate_batch(  # pyright: ignore[reportCallIssue]
            [list(prompt) for prompt in work.prompts],
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(**PAGED),
        )
    finally:
        models.plain.set_attn_implementation("sdpa")
    if len(found) != len(work.prompts) or any(reply.error for reply in found.values()):
        raise RuntimeError(f"{len(found)} of {len(work.prompts)} replies came: {[r.error for r in found.values() if r.error][:1]}")
    return sum(len(reply.generated_tokens) for reply in found.values())


@torch.inference_mode()
def bare_loop(models: Models, work: Work) -> int:
    """What a step costs at least in eager torch: all rows in step, nothing looked up, no log-prob kept, only the matrix products, attention
    over keys that lie in place, and the draw. It serves one shape of work and nothing else."""
    hf, config = models.plain, models.plain.config
    weights = dict(hf.named_parameters(remove_duplicate=False))
    ids = torch.tensor(work.prompts)
    num, given = ids.shape
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shape = (config.num_hidden_layers, 2, num, kv_heads, given + work.new_tokens, dim)
    cache = torch.zeros(shape)
    cos_all, sin_all = hf.model.rotary_emb(cache, torch.arange(shape[4])[None])

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[name], config.rms_norm_eps)

    def forward(tokens: Tensor, start: int) -> Tensor:
        stop = start + tokens.shape[1]
        cos, sin = cos_all[:, None, start:stop], sin_all[:, None, start:stop]
        x = F.embedding(tokens, weights["model.embed_tokens.weight"])
        for layer in range(shape[0]):
            at = f"model.layers.{layer}."
            h = norm(x, at + "input_layernorm.weight")
            q, k, v = (
                F.linear(h, weights[f"{at}self_attn.{p}_proj.weight"]).view(num, stop - start, -1, dim).transpose(1, 2) for p in "qkv"
            )
            q, k = (norm(y, f"{at}self_attn.{p}_norm.weight") for y, p in ((q, "q"), (k, "k")))
            q, k = (y * cos + torch.cat((-y[..., dim // 2 :], y[..., : dim // 2]), -1) * sin for y in (q, k))
            cache[layer, 0, :, :, start:stop], cache[layer, 1, :, :, start:stop] = k, v
            keys, values = cache[layer, :, :, :, :stop]
            if stop - start == 1:
                out = F.scaled_dot_product_attention(q.reshape(num, kv_heads, heads // kv_heads, dim), keys, values)
                out = out.reshape(num, heads, 1, dim)
            else:
                out = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)
            x = x + F.linear(out.transpose(1, 2).flatten(2), weights[at + "self_attn.o_proj.weight"])
            h = norm(x, at + "post_attention_layernorm.weight")
            gated = F.silu(F.linear(h, weights[at + "mlp.gate_proj.weight"])) * F.linear(h, weights[at + "mlp.up_proj.weight"])
            x = x + F.linear(gated, weights[at + "mlp.down_proj.weight"])
        logits = F.linear(norm(x[:, -1], "model.norm.weight"), weights["lm_head.weight"])
        return torch.multinomial(torch.softmax(logits, -1), 1)

    token = forward(ids, 0)
    out, alive = [token], token != EOS
    while len(out) < work.new_tokens and (not work.eos or bool(alive.any())):
        token = forward(token, given + len(out) - 1)
        out.append(token)
        alive &= token != EOS
    return _count(torch.cat(out, 1), work)


def _count(tokens: Tensor, work: Work) -> int:
    """Tokens [B, T] up to each row's end."""
    if not work.eos:
        return tokens.numel()
    return int(((tokens == EOS).cumsum(1) - (tokens == EOS).long() == 0).sum())


def vllm(models: Models, work: Work, *, compiled: bool) -> Took:
    """vLLM, started once; its own clock, so that the way there and back does not count."""
    if compiled not in models.vllm:
        models.vllm[compiled] = Vllm(models.plain, compiled=compiled)
    return models.vllm[compiled].sample(work.prompts, work.new_tokens, EOS if work.eos else None)


def took(peer: str, models: Models, work: Work) -> Took:
    """What `peer` takes for the work."""
    if peer.startswith("vllm"):
        return vllm(models, work, compiled=peer.endswith("compiled"))
    clock, busy = time.perf_counter(), time.process_time()
    tokens = PEERS[peer](models, work)
    return Took(tokens, time.perf_counter() - clock, time.process_time() - busy)


PEERS: dict[str, Callable[[Models, Work], int]] = {
    "whet": whet,
    "whet, 2 copies": whet_copies,
    "transformers generate, dynamic cache": generate,
    "transformers generate, static cache": lambda models, work: generate(models, work, cache_implementation="static"),
    "transformers continuous batching": continuous_batching,
    "bare loop": bare_loop,
}
