from __future__ import annotations

import copy
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from whet.model.attention import PackedRow, whet_attention, whet_mask
from whet.model.causal import random_causal
from whet.model.config import ModelConfig

DEVICE = torch.device(os.environ.get("WHET_TEST_DEVICE", "cpu"))


def alone(q, k, v, scale):
    """Causal attention of one segment from the definition. q: [L, heads, D], k and v: [L, kv_heads, D]."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    future = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any), st.sampled_from([(2, 2), (4, 2), (4, 1)]))
def test_a_packed_row_is_each_segment_alone_in_outputs_and_gradients(lengths, heads):
    generator = torch.Generator().manual_seed(sum(lengths))

    def random(num_heads):
        return torch.randn(sum(lengths), num_heads, 4, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()

    q, k, v, pull = random(heads[0]), random(heads[1]), random(heads[1]), random(heads[0]).detach()
    found = PackedRow(lengths, DEVICE)(0, q, k, v, 0.7)
    expected = torch.cat(
        [alone(*piece, 0.7) for piece in zip(*(x.split(lengths) for x in (q, k, v)), strict=True) if len(piece[0])]
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad((pull * out).sum(), (q, k, v)) for out in (found, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("max_waste", [1.0, 1.3, 100.0])
def test_padding_stays_within_its_bound(max_waste):
    lengths = [1, 2, 100, 90, 40, 64, 63, 0, 7, 100]
    row = PackedRow(lengths, DEVICE, max_waste)
    assert sum(bucket.num for bucket in row.buckets) == 9
    assert row.positions.tolist() == [i for n in lengths for i in range(n)]
    for bucket in row.buckets:
        # `gather` repeats a segment's first token as padding, so the distinct places are its tokens
        sizes = [len(set(places.tolist())) for places in bucket.gather.view(bucket.num, bucket.length)]
        assert max(sizes) == bucket.length <= max_waste * min(sizes) + 8


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_a_packed_model_is_the_plain_model_on_each_sequence(lengths):
    config = Qwen3Config(
        vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        intermediate_size=24, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    model = random_causal(config, ModelConfig(path="tiny", device=str(DEVICE)), seed=0)
    twin = Qwen3ForCausalLM._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    twin.load_state_dict(model.hf.state_dict())
    tokens = torch.randint(31, (sum(lengths),), generator=torch.Generator().manual_seed(len(lengths)))
    row = PackedRow(lengths, DEVICE)
    found = model.logits(model.hidden(tokens.to(DEVICE), row.positions, row)).cpu()
    expected = torch.cat([twin(input_ids=piece[None]).logits[0] for piece in tokens.split(lengths)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    (pull * found).sum().backward()
    (pull * expected).sum().backward()
    theirs = dict(twin.named_parameters())
    for name, p in model.hf.named_parameters():
        distance, norm = float((p.grad.cpu() - theirs[name].grad).norm()), float(theirs[name].grad.norm())
        assert distance <= 1e-5 * norm + 1e-6, name  # a token alone has queries without a gradient


def call(**features):
    module = nn.Module()
    module.layer_idx = 1
    x = torch.zeros(1, 2, 3, 4)

    def attend(layer, q, k, v, scale):
        assert (layer, tuple(q.shape)) == (1, (3, 2, 4))
        return q + scale

    return whet_attention(module, x, x, x, None, **{"attend": attend, **features})


def test_the_default_scale_is_one_over_the_root_of_the_head_size():
    out, weights = call()
    assert weights is None and out.shape == (1, 3, 2, 4) and out.unique().tolist() == [0.5]
    assert call(scaling=0.25)[0].unique().tolist() == [0.25]


@pytest.mark.parametrize("feature", ["sliding_window", "softcap", "s_aux", "sinks", "position_bias"])
def test_features_that_change_the_result_are_refused_by_name(feature):
    with pytest.raises(ValueError, match=f"Module needs the attention feature '{feature}'"):
        call(**{feature: 4})
    assert call(**{feature: None})[0].shape == (1, 3, 2, 4)


def test_dropout_and_lost_arguments_and_windows_are_refused():
    with pytest.raises(ValueError, match=r"attention dropout is 0.1; set attention_dropout to 0"):
        call(dropout=0.1)
    with pytest.raises(ValueError, match="does not hand keyword arguments on"):
        call(attend=None)
    with pytest.raises(ValueError, match=r"qwen3 attends to a window of 128 tokens \(sliding or chunked attention\)"):
        whet_mask(batch_size=1, local_size=128, config=Qwen3Config(use_sliding_window=True, sliding_window=128, max_window_layers=0))
    assert whet_mask(batch_size=1, local_size=None, config=Qwen3Config()) is None
    assert whet_mask(batch_size=1, local_size=128, config=Qwen3Config()) is None, "no layer takes it"
