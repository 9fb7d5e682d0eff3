"""One engine, many architectures: greedy tokens and scores are those of plain transformers, to rounding."""

from __future__ import annotations

import asyncio
import random
from functools import cache

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.engine.engine_setup import SHAPE, VOCAB, Reply, engine_of, plain_logprobs, reply_to, serve
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.types import Request, SamplingParams

TOLERANCE = {"float64": 1e-8, "float32": 1e-4}
ROUTED_IN_FLOAT32 = ("glm4_moe", "deepseek_v3")
"""Their own code computes which experts a token goes to, and with what weights, in float32 whatever the model's dtype."""
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SHAPE, **MOE, head_dim=16, num_experts=4),
    "qwen2_moe": lambda: Qwen2MoeConfig(**SHAPE, **MOE, num_experts=4, shared_expert_intermediate_size=48),
    "qwen2_moe_window": lambda: Qwen2MoeConfig(
        **SHAPE, **MOE, num_experts=4, shared_expert_intermediate_size=48, use_sliding_window=True, sliding_window=4, max_window_layers=0
    ),
    "longrope": lambda: Phi3Config(
        **(SHAPE | {"max_position_embeddings": 512}), original_max_position_embeddings=256, rope_parameters=dict(LONGROPE)
    ),
    "dynamic": lambda: LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "glm4": lambda: Glm4Config(**SHAPE, head_dim=16),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SHAPE, **MOE, head_dim=16, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1
    ),
    "deepseek_v3": lambda: DeepseekV3Config(**(SHAPE | MOE | MLA)),
    "gemma": lambda: GemmaConfig(**SHAPE, head_dim=16),
    "granite": lambda: GraniteConfig(**SHAPE, attention_multiplier=0.3, logits_scaling=1.7, residual_multiplier=0.8),
    "cohere": lambda: CohereConfig(**SHAPE, logit_scale=0.4),
    "olmo2": lambda: Olmo2Config(**SHAPE),
    "phi3": lambda: Phi3Config(**SHAPE),
    "mistral": lambda: MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
    "gpt2": lambda: GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=None),
}


def config_of(kind: str) -> PreTrainedConfig:
    return CONFIGS[kind]()


@cache
def model_of(kind: str, dtype: str) -> CausalModel:
    return random_causal(config_of(kind), ModelConfig(path="", dtype=dtype, device="cpu"), seed=3)


@cache
def plain_of(kind: str, dtype: str) -> PreTrainedModel:
    """The same weights in a model that has never heard of whet."""
    hf = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="sdpa", dtype=getattr(torch, dtype))
    if dtype == "float64" and hf._can_set_experts_implementation():
        hf.set_experts_implementation("eager")  # grouped matrix products have no float64
    hf.load_state_dict(model_of(kind, dtype).hf.state_dict())
    return hf.eval()


def some_requests() -> list[Request]:
    """Siblings, prompts that begin alike, and prompts of one token; greedy."""
    rng = random.Random(5)
    system = tuple(rng.randrange(VOCAB) for _ in range(11))
    prompts = [(7,), system, *(system + tuple(rng.randrange(VOCAB) for _ in range(n)) for n in (1, 6, 19))]
    return [Request(f"{i}/{k}", p, SamplingParams(rng.randrange(3, 12), 0.0)) for i, p in enumerate(prompts) for k in range(2)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_tokens_and_scores_are_those_of_plain_transformers(kind, dtype):
    engine = engine_of(model_of(kind, dtype), cache_tokens=72, max_batch_tokens=20)
    requests = some_requests()

    async def play() -> tuple[list[Reply], list[list[float]]]:
        replies = [await reply_to(engine, requests[0])]
        replies += await asyncio.gather(*(reply_to(engine, request) for request in requests[1:]))
        scores = [(await engine.score(q.tokens + r.tokens)).logprobs for q, r in zip(requests, replies, strict=True)]
        return replies, scores

    tolerance = 2e-6 if dtype == "float64" and kind in ROUTED_IN_FLOAT32 else TOLERANCE[dtype]
    replies, scores = serve(engine, play)  # type: ignore[misc]
    assert engine.core.scheduler.num_preempted > 0, "the pool was meant to be too small"
    for request, reply, found in zip(requests, replies, scores, strict=True):
        tokens = request.tokens + reply.tokens
        table = plain_logprobs(plain_of(kind, dtype), tokens)
        assert list(reply.tokens) == table.argmax(-1)[len(request.tokens) - 1 : -1].tolist()
        expected = [float(table[i, token]) for i, token in enumerate(tokens[1:])]
        assert found == pytest.approx(expected, abs=tolerance)
