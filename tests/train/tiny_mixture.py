"""A tiny mixture of experts whose routers nearly tie, an engine that breaks the ties otherwise than the trainer, and a plain reference."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import torch
from transformers import Glm4MoeConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from whet.core.batch import batch_of
from whet.core.weights import REDUCERS
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.engine import EmbeddedEngine
from whet.env.sampling import Reply
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.rollout.samples import samples_of
from whet.types import Finish, Message, Origin, Outcome, Request, Rewards, SamplingParams, Task, Trajectory, Turn
from whet.types.columns import Runs
from whet.types.json_codec import trajectory_from_json, trajectory_to_json

VOCAB, LAYERS, EXPERTS, TOP_K = 61, 3, 8, 2
PROMPT = tuple(range(3, 17))
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, num_experts=EXPERTS, norm_topk_prob=True, tie_word_embeddings=False),
    "glm4_moe": lambda: Glm4MoeConfig(**SIZES, n_routed_experts=EXPERTS, n_group=1, topk_group=1, first_k_dense_replace=1),
}


def gates_of(model: CausalModel) -> list[torch.nn.Module]:
    return [block.gate for block in model.hf.modules() if hasattr(block, "experts")]


def mixture(kind: str = "qwen3_moe", dtype: str = "float64", *, gradient_checkpointing: bool | str = False) -> CausalModel:
    """Every second of eight experts has nearly the same router weights. Those of all types are those in float64, rounded."""
    config = ModelConfig(path="tiny", dtype=dtype, device="cpu", gradient_checkpointing=gradient_checkpointing)
    model = random_causal(CONFIGS[kind](), config, seed=0)
    if dtype != "float64":
        model.hf.load_state_dict(mixture(kind).hf.state_dict())
        return model
    with torch.no_grad():
        for gate in gates_of(model):
            gate.weight[2:] = gate.weight[:2].repeat(3, 1) * (1 + 1e-6 * torch.arange(6)[:, None])
    return model


def unsteady(model: CausalModel, size: float = 1e-3, seed: int = 1) -> list[torch.utils.hooks.RemovableHandle]:
    """Have the routers choose by logits with noise: that breaks ties, and leaves the weights of what is chosen as they are."""
    noise = torch.Generator().manual_seed(seed)

    def choose(router, _, output):
        logits, weights, _ = output
        chosen = (logits + size * torch.randn(logits.shape, generator=noise)).topk(TOP_K).indices
        if hasattr(router, "e_score_correction_bias"):
            found = logits.sigmoid().gather(-1, chosen)
            found = found / (found.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor
        else:
            found = logits.softmax(-1, dtype=torch.float).gather(-1, chosen)
            found = found / found.sum(-1, keepdim=True)
        return logits, found.to(weights.dtype), chosen

    return [gate.register_forward_hook(choose) for gate in gates_of(model)]


def play(model: CausalModel, num_siblings: int = 4, *, routes: bool = True, cache_tokens: int = 512, **engine):
    """Siblings of one prompt, each with a second turn, as a stopped rollout gives them back."""
    params = {"max_tokens": 9, "routes": routes}

    async def main():
        with ThreadPoolExecutor(1) as thread:
            config = EmbeddedConfig(cache_tokens=cache_tokens, block_size=4, max_batch_tokens=16, **engine)
            made = EmbeddedEngine(model, config, thread, shares_weights=True, deterministic=False)
            try:
                return await asyncio.gather(*(sibling(made, i) for i in range(num_siblings)))
            finally:
                await made.close()

    async def sibling(made, i):
        turns, history = [], ()
        for place, context in enumerate((PROMPT, (50, 51))):
            history += context
            reply = Reply(len(context))
            first = reply.routes_from(len(history)) if routes else 0
            request = Request(
                f"{i}/{place}", history, SamplingParams(**params, seed=7 * i + place), chunk_tokens=4, routes_from=first
            )
            async for chunk in made.generate(request):
                reply.take(chunk, request)
            origin = (Origin.ENVIRONMENT if place else Origin.PROMPT,) * len(context)
            tokens, said = reply.tokens.column(), Message("assistant", "")
            told = reply.all_routes if routes else None
            versions = Runs.from_runs(reply.versions)
            turns.append(Turn(context, origin, tokens, reply.logprobs.column(), versions, said, Finish.LENGTH, routes=told))
            history += tuple(tokens)
        return Trajectory(f"t/{i}", Task("t", "q"), tuple(turns), Outcome.COMPLETED, Rewards(float(i)))

    played = list(asyncio.run(main()))
    again = [trajectory_from_json(json.loads(json.dumps(trajectory_to_json(t)))) for t in played]
    assert again == played
    return again


def batch_from(trajectories):
    batch = batch_of([sample for trajectory in trajectories for sample in samples_of(trajectory)])
    return batch.with_(weights=REDUCERS["sample_mean"](batch))


def plain(model: CausalModel, told: list[torch.Tensor]) -> Qwen3MoeForCausalLM:
    """The same weights in a model of transformers that sends a sequence's tokens to the experts it is told: layer by layer [T, K] in
    `told`, which may be changed from one sequence to the next."""
    twin = Qwen3MoeForCausalLM._from_config(CONFIGS["qwen3_moe"](), attn_implementation="sdpa", dtype=model.dtype)
    twin.load_state_dict(model.hf.state_dict())
    for i, layer in enumerate(twin.model.layers):
        layer.mlp.forward = _mixed(layer.mlp, i, told)
    return twin.eval()


def _mixed(block, i, told):
    def forward(hidden):
        rows = []
        for x, experts in zip(hidden[0], told[i].tolist(), strict=True):
            shares = (block.gate.weight @ x).softmax(-1)[experts]
            shares = shares / shares.sum()
            parts = []
            for share, expert in zip(shares, experts, strict=True):
                gate, up = (block.experts.gate_up_proj[expert] @ x).chunk(2)
                parts.append(share * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)))
            rows.append(sum(parts))
        return torch.stack(rows)[None]

    return forward
