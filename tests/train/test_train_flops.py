"""Operations that the backend says its passes needed, against what torch's own counter sees while they run."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSequenceClassification, Qwen3MoeConfig

from tests.conftest import cuts_layers
from tests.train.tiny_policy import qwen3, rollout
from whet.algo.base import LossTerms, Need
from whet.algo.sft import sft_loss
from whet.core.weights import REDUCERS
from whet.model.causal import random_causal, settle
from whet.model.config import ModelConfig
from whet.model.forest import Segment, spans_of
from whet.model.scalar import ScalarModel
from whet.train.torch_native import layout
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig

CONFIG = ModelConfig(path="tiny", dtype="float64", device="cpu")  # mixtures compute each expert by itself in float64, for exact counts
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


class OneByOne:
    """Attention in products of one query each with what it sees, so that no product is of a hidden pair."""

    def __init__(self, segments, device):
        self.sees, positions = [], []
        spans = spans_of(segments)
        for span, segment in zip(spans, segments, strict=True):
            above, parent = [], segment.parent
            while parent >= 0:
                above += range(spans[parent].start, spans[parent].end)
                parent = segments[parent].parent
            for t in range(span.start, span.end):
                self.sees.append(torch.tensor([*above, *range(span.start, t + 1)]))
                positions.append(span.depth + t - span.start)
        self.positions = torch.tensor(positions)

    def __call__(self, layer, q, k, v, scale):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).transpose(0, 1) for x in (k, v))
        outs = []
        for t, seen in enumerate(self.sees):
            scores = torch.bmm(q[t][:, None], k[:, seen].mT) * scale
            outs.append(torch.bmm(scores.softmax(-1), v[:, seen])[:, 0])
        return torch.stack(outs)


NO_ROTARY_PRODUCT = pytest.mark.skipif(not cuts_layers(), reason="older transformers rotate by a product, which torch counts")


@pytest.fixture
def one_by_one(monkeypatch):
    monkeypatch.setattr(layout, "forest_row", lambda segments, device, dtype: OneByOne(segments, device))
    monkeypatch.setattr(layout, "PackedRow", lambda lengths, device: OneByOne([Segment(n, -1) for n in lengths], device))


def model_of(kind):
    if kind == "scalar":
        hf = AutoModelForSequenceClassification.from_config(
            type(qwen3())(**qwen3().to_dict() | {"num_labels": 1}), attn_implementation="whet", dtype=torch.float64
        )
        return settle(ScalarModel(hf), CONFIG, trainable=True)
    shape = Qwen3MoeConfig(**qwen3().to_dict() | MOE) if kind == "moe" else qwen3(tied=kind == "tied")
    return random_causal(shape, CONFIG, seed=0)


def backend_of(kind, rows, **settings):
    return TorchBackend(model_of(kind), TrainConfig(rows=rows, max_tokens_per_device=40, **settings), total_steps=1)


def counted(work):
    """Operations that torch saw."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def learn(backend):
    batch = rollout()
    batch = batch.with_(weights=REDUCERS["token_mean"](batch))
    backend.forward_backward(batch, lambda part, out: LossTerms(out.values, {}) if out.values is not None else sft_loss(part, out))


@NO_ROTARY_PRODUCT
@pytest.mark.parametrize("rows", ["chains", "forest"])
@pytest.mark.parametrize("kind", ["tied", "untied", "moe", "scalar"])
def test_operations_are_those_that_torch_counts(kind, rows, one_by_one):
    backend = backend_of(kind, rows)
    need = Need.VALUES if kind == "scalar" else Need.OLD_LOGPROBS
    found = counted(lambda: backend.annotate(rollout(), need))
    assert backend.flops == found > 0
    before = backend.flops
    found = counted(lambda: learn(backend))
    assert backend.flops - before == found


@NO_ROTARY_PRODUCT
def test_a_frozen_base_has_no_gradients_of_matrices(one_by_one):
    backend = backend_of("tied", "chains", lora={"rank": 3})
    found = counted(lambda: learn(backend))
    batch, first = rollout(), backend.model.decoder.layers[0].self_attn
    num_tokens = int(batch.lengths[batch.sample_of_token[batch.loss_mask].unique()].sum())
    names = [f"{q}_proj.{part}.weight" for q in "qkv" for part in ("base_layer", "lora_A.default")]
    unasked = sum(first.get_parameter(name).numel() for name in names)  # gradients by the first layer's input, which nothing needs
    assert backend.flops - found == 2 * unasked * num_tokens
    before = backend.flops
    base = backend.base()
    found = counted(lambda: base.annotate(rollout(), Need.REF_LOGPROBS))
    assert base.flops - before == found


def test_what_is_computed_again_is_not_needed():
    plain, again = (backend_of("tied", "chains", logprob_chunk_tokens=chunk) for chunk in (None, 3))
    learn(plain)
    learn(again)
    assert plain.flops == again.flops
