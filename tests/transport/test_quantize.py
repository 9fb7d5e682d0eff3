"""A model's tensors as a stream of quantized files' tensors: experts that a model joins, buffers, digests."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Qwen3MoeConfig

from whet.engine.servers.pool import names_in_format
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.digest import digests_of
from whet.model.folders import read_weights
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.model.quantization import own_format
from whet.transport.folder import FolderWriter
from whet.transport.quantize import QuantizingStream


@pytest.fixture(scope="module")
def mixture():
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3MoeConfig(vocab_size=64, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2, **sizes)
    return random_causal(config, ModelConfig(path="", device="cpu", dtype="bfloat16"), seed=0)


def test_the_experts_of_a_mixture_are_quantized_one_by_one_under_the_names_of_files(mixture, tmp_path):
    quantization, bare = own_format("fp8", [128]), without_contents(mixture)
    stream = QuantizingStream(mixture.named_weights(), Naming(bare), quantization)
    size = FolderWriter(bare, 2**17, quantization).write(tmp_path, stream)
    written = dict(read_weights(tmp_path))
    assert size == sum(tensor.nbytes for tensor in written.values())
    assert stream.digests == digests_of(written.items()) and stream.digests.keys() == names_in_format(mixture, quantization)
    expert, router = "model.layers.1.mlp.experts.3.down_proj", "model.layers.1.mlp.gate.weight"
    assert written[f"{expert}.weight"].dtype == torch.float8_e4m3fn and written[f"{expert}.weight_scale_inv"].shape == (1, 1)
    assert written[router].dtype == torch.bfloat16
    reading = {"quantization_config": FineGrainedFP8Config(dequantize=True), "dtype": "bfloat16"}
    found = dict(AutoModelForCausalLM.from_pretrained(tmp_path, **reading).named_parameters())
    for name, weight in mixture.hf.named_parameters():
        weight = weight.detach()
        kept = weight.dim() < 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))
        assert float((found[name].detach() - weight).abs().max()) <= float(weight.abs().max()) / 16, name
        assert torch.equal(found[name], weight) == kept, name


def test_another_order_of_reading_changes_nothing(mixture):
    quantization, naming = own_format("fp8", [128]), Naming(without_contents(mixture))
    first = QuantizingStream(mixture.named_weights(), naming, quantization)
    second = QuantizingStream(reversed(list(mixture.named_weights())), naming, quantization)
    assert len(list(first)) == len(list(second)) and first.digests == second.digests
