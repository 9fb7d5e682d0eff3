"""Small models of each kind, a rollout for them, and what one process finds with it."""

from __future__ import annotations

import random
from dataclasses import fields
from functools import cache

import torch
from pydantic import TypeAdapter
from transformers import Glm4MoeConfig, Qwen3Config, Qwen3MoeConfig

from whet.algo.base import StepPlan
from whet.algo.config import AlgorithmConfig
from whet.algo.table import build_algorithm
from whet.core.batch import TrainBatch, batch_of
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.model.scalar import ScalarModel
from whet.model.shards import whole
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import ParallelConfig, TrainConfig
from whet.types import Origin, Sample

VOCAB = 64
STEPS = 3
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
CONFIGS = {
    "dense": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "wide": lambda: Qwen3Config(**SIZES | {"hidden_size": 64, "intermediate_size": 256}, tie_word_embeddings=False),
    "tied": lambda: Qwen3Config(**SIZES, tie_word_embeddings=True),
    "moe": lambda: Qwen3MoeConfig(
        **SIZES, tie_word_embeddings=False, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "biased": lambda: Glm4MoeConfig(
        **SIZES, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1
    ),
}


def model_of(kind: str, dtype: str = "float32", *, gradient_checkpointing: bool | str = False) -> CausalModel:
    config = ModelConfig(path="tiny", dtype=dtype, device="cpu", gradient_checkpointing=gradient_checkpointing)
    return random_causal(CONFIGS[kind](), config, seed=0)


def samples() -> list[Sample]:
    """Four groups: `.` prompt, `#` sampled, `e` written by the environment; other lengths, a failed one, siblings that share a prompt."""
    origins = {".": Origin.PROMPT, "#": Origin.MODEL, "e": Origin.ENVIRONMENT}
    rows = [
        ("a", "...####ee##", 1.0),
        ("a", "......e##e#", 0.0),
        ("a", "...#eee#######ee###", 0.25),
        ("b", ".##########", 1.0),
        ("b", ".#####", 0.0),
        ("c", "......####e#", 2.0),
        ("c", "......##", -1.0),
        ("c", "......######", 0.5),
        ("d", "..###", 0.0),
        ("d", "..##ee####ee#", 1.0),
    ]
    out = []
    for i, (group, mask, reward) in enumerate(rows):
        draw, prompt = random.Random(i), random.Random(group)
        out.append(
            Sample(
                tokens=tuple((prompt if c == "." else draw).randrange(VOCAB) for c in mask),
                origin=tuple(origins[c] for c in mask),
                loss_mask=tuple(c == "#" for c in mask),
                logprobs=tuple(-draw.uniform(2, 6) if c == "#" else 0.0 for c in mask),
                versions=tuple(0 if c == "#" else -1 for c in mask),
                group=group,
                trajectory=f"{group}/{i}",
                order=0,
                reward=reward,
                temperature=0.8 if group == "b" else 1.0,
            )
        )
    return out


def step_of(name: str) -> tuple[object, TrainBatch]:
    """An algorithm, and a step with credit and weights; the old log-probs are some way off what the model says."""
    algorithm = build_algorithm(TypeAdapter(AlgorithmConfig).validate_python({"name": name}), StepPlan(2))
    batch = batch_of(samples())
    shift = torch.linspace(-0.4, 0.4, batch.num_tokens)
    batch = batch.with_(old_logprobs=(shift - 4.2) * batch.loss_mask, ref_logprobs=-4.1 * batch.loss_mask.float())
    if name == "ppo":
        values = torch.linspace(-1, 1, batch.num_tokens)
        batch = batch.with_(values=values, scores=values.roll(-1))
    batch, _ = algorithm.assign_credit(batch)
    return algorithm, algorithm.prepare(batch.with_(weights=algorithm.reducer(batch)))


def backend_of(model: CausalModel | ScalarModel, degrees: ParallelConfig | None, steps: int | None = 10, **settings) -> TorchBackend:
    """A backend with rows short enough that there are several for each rank, and several chunks of log-probs in each."""
    defaults = {"max_tokens_per_device": 24, "rows": "chains", "logprob_chunk_tokens": 5, "optim": {"lr": 0.5, "clip_grad": 0.3}}
    return TorchBackend(model, TrainConfig(**(defaults | settings), parallel=degrees), total_steps=steps)


def three_steps(kind: str, algorithm_name: str, degrees: ParallelConfig | None, settings: dict | None = None) -> dict:
    """Loss, log-probs, metrics, gradients and their norm of a first step, and the weights after three steps of clipped SGD."""
    settings = dict(settings or {})
    model = model_of(kind, gradient_checkpointing=settings.pop("gradient_checkpointing", False))
    backend = backend_of(model, degrees, **settings)
    params = dict(backend.model.hf.named_parameters())
    backend.optimizer.adamw = torch.optim.SGD([{"params": list(g["params"])} for g in backend.optimizer.adamw.param_groups], lr=0.0)
    algorithm, batch = step_of(algorithm_name)
    out: dict = {}
    for step in range(STEPS):
        found = backend.forward_backward(batch, algorithm.loss, entropy_grad=algorithm.entropy_grad, per_token=step == 0)
        if step == 0:
            out["grads"] = {name: whole(p.grad).clone() for name, p in params.items()}
        norm = backend.optim_step()["optim/grad_norm"].value
        if step == 0:
            metrics = {name: metric.value for name, metric in found.metrics.items()}
            out |= {"loss": found.loss, "logprobs": found.logprobs, "metrics": metrics, "norm": norm}
            out |= {"tokens": found.num_tokens, "flops": backend.flops}
            out["terms"] = {field.name: getattr(found.tokens, field.name) for field in fields(found.tokens)}
    out["weights"] = {name: w.detach().clone() for name, w in backend.named_weights()}
    return out


@cache
def alone(kind: str, algorithm_name: str) -> dict:
    """What one process finds."""
    return three_steps(kind, algorithm_name, None)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest distance by the largest entry."""
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))
