"""A tiny random Qwen3 and a rollout for it, for the tests of training."""

from __future__ import annotations

import os
import random

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from whet.core.batch import TrainBatch, batch_of
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.types import Origin, Sample

VOCAB = 61
DEVICE = os.environ.get("WHET_TEST_DEVICE", "cpu")
"""Where the policy lies; plain models are on the CPU."""


def qwen3(*, tied: bool = True) -> Qwen3Config:
    """Two layers, grouped queries, weights wide enough that the logits are not all alike."""
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8 if DEVICE == "cpu" else 16,  # flex_attention's kernel for CUDA has no smaller heads
        intermediate_size=48,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )


def policy(dtype: str = "float32", *, seed: int = 0, gradient_checkpointing: bool | str = False) -> CausalModel:
    config = ModelConfig(path="tiny", dtype=dtype, device=DEVICE, gradient_checkpointing=gradient_checkpointing)
    return random_causal(qwen3(), config, seed=seed)


def plain(model: CausalModel) -> Qwen3ForCausalLM:
    """The same weights in a model that knows nothing of whet."""
    twin = Qwen3ForCausalLM._from_config(qwen3(), attn_implementation="eager", dtype=model.dtype)
    twin.load_state_dict(model.hf.state_dict())
    return twin.eval()


def trajectory(group: str, index: int, masks: list[str], *, reward: float, valid: bool = True, heat: float = 1.0):
    """One sample per mask: `.` prompt, `#` sampled by the model, `e` written by the environment."""
    origins = {".": Origin.PROMPT, "#": Origin.MODEL, "e": Origin.ENVIRONMENT}
    for order, mask in enumerate(masks):
        draw = random.Random(f"{group}/{index}/{order}")
        yield Sample(
            tokens=tuple(draw.randrange(VOCAB) for _ in mask),
            origin=tuple(origins[c] for c in mask),
            loss_mask=tuple(c == "#" for c in mask),
            logprobs=tuple(-draw.uniform(2, 6) if c == "#" else 0.0 for c in mask),
            versions=tuple(0 if c == "#" else -1 for c in mask),
            group=group,
            trajectory=f"{group}/{index}",
            order=order,
            reward=reward,
            valid=valid,
            temperature=heat,
        )


def rollout_samples() -> list[Sample]:
    """Three groups: tool replies, a trajectory in two samples, a failed one, one without a trained token, other lengths."""
    return [
        *trajectory("a", 0, ["...####ee##"], reward=1.0),
        *trajectory("a", 1, ["...##", "......e##e#"], reward=0.0),
        *trajectory("a", 2, ["...#eee#######ee###"], reward=0.25),
        *trajectory("a", 3, ["...###"], reward=0.0, valid=False),
        *trajectory("b", 0, [".#"], reward=1.0, heat=0.5),
        *trajectory("b", 1, [".############"], reward=0.0, heat=0.5),
        *trajectory("b", 2, ["."], reward=1.0, heat=0.5),
        *trajectory("c", 0, [".....####e#"], reward=2.0, heat=2.0),
        *trajectory("c", 1, [".....#"], reward=-1.0, heat=2.0),
    ]


def rollout() -> TrainBatch:
    return batch_of(rollout_samples())


def gradients(model: CausalModel) -> dict[str, torch.Tensor]:
    """Copies, on the CPU."""
    return {name: p.grad.to("cpu", copy=True) for name, p in model.hf.named_parameters() if p.grad is not None}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance by the expected one's norm."""
    found, expected = found.cpu().double(), expected.cpu().double()
    return float((found - expected).norm() / expected.norm())
