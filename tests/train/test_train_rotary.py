"""Rotary scaling that depends on the longest sequence of a pass: up to its limit company does not matter, beyond it is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, Qwen3Config

from whet.algo.base import Need
from whet.core.batch import batch_of
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.rotary import rotary_limit
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Origin, Sample

LIMIT = 24
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 48,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [8.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
CONFIGS = {
    "longrope": lambda: Phi3Config(
        **SHAPE, max_position_embeddings=4 * LIMIT, original_max_position_embeddings=LIMIT, rope_parameters=dict(LONGROPE)
    ),
    "dynamic": lambda: LlamaConfig(**SHAPE, max_position_embeddings=LIMIT, rope_parameters=dict(DYNAMIC)),
}


def backend_of(kind):
    model = random_causal(CONFIGS[kind](), ModelConfig(path="", device="cpu"), seed=0)
    return TorchBackend(model, TrainConfig(rows="chains", max_tokens_per_device=4 * LIMIT), total_steps=None)


def samples(*lengths):
    """Samples of which all but the first token train; each by its place the same whatever else there is."""
    return batch_of(
        [
            Sample(
                tokens=tuple((7 * i + 3 * t) % 61 for t in range(n)),
                origin=(Origin.PROMPT, *(Origin.MODEL,) * (n - 1)),
                loss_mask=(False, *(True,) * (n - 1)),
                logprobs=(0.0,) * n,
                versions=(0,) * n,
                group="g",
                trajectory=str(i),
            )
            for i, n in enumerate(lengths)
        ]
    )


def logprobs(backend, *lengths):
    batch = samples(*lengths)
    found = backend.annotate(batch, Need.OLD_LOGPROBS).old_logprobs
    return found.split(batch.lengths.tolist())


@pytest.mark.parametrize("kind", CONFIGS)
def test_company_up_to_the_limit_changes_nothing(kind):
    backend = backend_of(kind)
    alone = logprobs(backend, 10)[0]
    torch.testing.assert_close(logprobs(backend, 10, LIMIT)[0], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logprobs(backend, 10)[0], alone, rtol=0, atol=0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_longer_sample_is_refused_by_name_and_not_run_with_its_company(kind):
    backend = backend_of(kind)
    told = rf"a sequence has {LIMIT + 1} tokens, but beyond {LIMIT} the rotary scaling of (Phi3|Llama)ForCausalLM"
    with pytest.raises(ValueError, match=told):
        logprobs(backend, 10, LIMIT + 1)


def test_the_limit_is_read_of_every_layer_type_and_fixed_scaling_has_none():
    assert rotary_limit(Qwen3Config()) is None
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    assert rotary_limit(LlamaConfig(rope_parameters=yarn)) is None
    config = CONFIGS["longrope"]()
    config.rope_parameters = {"full_attention": yarn, "sliding_attention": dict(LONGROPE) | {"original_max_position_embeddings": 12}}
    assert rotary_limit(config) == 12
