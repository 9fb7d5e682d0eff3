"""Each rank reads its own parts of a folder's weights, and has what it would have of the whole model, bit for bit."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.parallel.ranks import on_ranks
from tests.parallel.tiny_models import backend_of, model_of, samples
from whet.algo.base import Need
from whet.core.batch import batch_of
from whet.model.causal import load_causal
from whet.model.config import LoraConfig, ModelConfig
from whet.model.pieces import Files
from whet.model.scalar import load_scalar
from whet.train.torch_native.config import ParallelConfig

pytestmark = pytest.mark.long

LAYOUTS = [
    ("tied", {"shard": 2}, "float32", {}),
    ("dense", {"shard": 2, "tensor": 2}, "bfloat16", {}),
    ("moe", {"shard": 2, "expert": 2}, "float32", {}),
    pytest.param("dense", {"replicate": 2, "tensor": 2}, "float32", {}, marks=pytest.mark.slow),
    pytest.param("tied", {"tensor": 2}, "bfloat16", {"offload": True}, marks=pytest.mark.slow),
    pytest.param("tied", {"shard": 2, "tensor": 2}, "float32", {}, marks=pytest.mark.slow),
    pytest.param("moe", {"shard": 2, "tensor": 2, "expert": 4}, "bfloat16", {}, marks=pytest.mark.slow),
    pytest.param("moe", {"shard": 4, "expert": 2}, "float32", {"offload": True}, marks=pytest.mark.slow),
    pytest.param("moe", {"shard": 4}, "float32", {}, marks=pytest.mark.slow),
    pytest.param("moe", {"shard": 2, "tensor": 2}, "float32", {}, marks=pytest.mark.slow),
    pytest.param("biased", {"context": 2, "tensor": 2, "expert": 4}, "bfloat16", {}, marks=pytest.mark.slow),
]


def folder_of(kind, folder):
    """With biases that are not 0, where it has any."""
    model = model_of(kind)
    for _, buffer in model.saved_buffers():
        buffer.copy_(torch.linspace(-1, 1, len(buffer)))
    model.hf.save_pretrained(folder)


def held(backend):
    """What this rank has, by name."""
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in backend.model.named_state()}


def counted(read):
    """A stand-in for `Files.read` that counts the bytes it gives, by name."""
    counts: dict[str, int] = {}

    def reading(files, name, kept):
        found = read(files, name, kept)
        counts[name] = counts.get(name, 0) + found.nbytes
        return found

    return reading, counts


def both_ways(folder, degrees, dtype, settings):
    config = ModelConfig(path="tiny", dtype=dtype, device="cpu")
    whole = backend_of(load_causal(folder, config, trainable=True), degrees, **settings)
    Files.read, counts = counted(Files.read)
    direct = backend_of(load_causal(folder, config, trainable=True, spread=True), degrees, **settings)
    batch = batch_of(samples())
    logprobs = [backend.annotate(batch, Need.OLD_LOGPROBS).old_logprobs for backend in (whole, direct)]
    states = [{name: (tensor.clone(), tensor.device) for name, tensor in held(backend).items()} for backend in (whole, direct)]
    weights = [tensor.detach().clone() for backend in (whole, direct) for _, tensor in backend.named_weights()]
    owned = sum(p.to_local().numel() for p in direct.model.hf.parameters()) + sum(b.numel() for _, b in direct.model.saved_buffers())
    return states, logprobs, weights, counts, owned


@pytest.mark.parametrize(("kind", "degrees", "dtype", "settings"), LAYOUTS)
def test_each_rank_reads_what_it_keeps_and_no_more(kind, degrees, dtype, settings, tmp_path):
    folder_of(kind, tmp_path)
    degrees = ParallelConfig(**degrees)
    whole_bytes = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    parts = degrees.shard * degrees.context * degrees.tensor
    for states, logprobs, weights, counts, owned in on_ranks(degrees.num_ranks, both_ways, tmp_path, degrees, dtype, settings):
        expected, found = states
        assert found.keys() == expected.keys()
        for name, (tensor, device) in expected.items():
            assert found[name][0].dtype == tensor.dtype and found[name][1] == device and torch.equal(found[name][0], tensor), name
        assert torch.equal(*logprobs)
        half = len(weights) // 2
        assert all(torch.equal(a, b) for a, b in zip(weights[:half], weights[half:], strict=True))
        assert sum(counts.values()) == 4 * owned, "float32 in the file, each entry that is kept read once"
        assert whole_bytes / parts <= sum(counts.values()) <= whole_bytes / parts + 4 * 4096, "its share, and norms, biases and routers"


def adapted(folder, degrees, dtype):
    torch.manual_seed(3)
    config = ModelConfig(path="tiny", dtype=dtype, device="cpu")
    model = load_causal(folder, config, trainable=True, spread=degrees is not None)
    backend = backend_of(model, degrees, lora=LoraConfig(rank=4))
    weights = {name: tensor.detach().clone() for kind in ("merged", "adapter") for name, tensor in backend.named_weights(kind)}
    return weights, backend.adapter.base_digest()


@pytest.mark.parametrize(
    ("kind", "degrees", "dtype"),
    [
        ("tied", {"shard": 2}, "float32"),
        ("tied", {"shard": 2}, "bfloat16"),
        ("tied", {"tensor": 2}, "bfloat16"),
        ("moe", {"shard": 2, "expert": 2}, "float32"),
    ],
)
def test_a_fresh_adapter_is_drawn_as_beside_the_whole_model_on_every_rank(kind, degrees, dtype, tmp_path):
    folder_of(kind, tmp_path)
    expected, digest = adapted(tmp_path, None, dtype)
    for found, base in on_ranks(2, adapted, tmp_path, ParallelConfig(**degrees), dtype):
        assert found.keys() == expected.keys() and base == digest
        assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)


def with_new_head(folder, degrees):
    config = ModelConfig(path="tiny", device="cpu")
    model = load_scalar(folder, config, trainable=True, new_head="normal", seed=5, spread=degrees is not None)
    return {name: tensor.detach().clone() for name, tensor in backend_of(model, degrees).named_weights()}


def test_a_new_head_is_the_same_on_every_rank(tmp_path):
    folder_of("dense", tmp_path)
    expected = with_new_head(tmp_path, None)
    assert bool(expected["score.weight"].any())
    for found in on_ranks(2, with_new_head, tmp_path, ParallelConfig(shard=2)):
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def refused(folder, degrees):
    with pytest.raises(ValueError) as caught:
        backend_of(load_causal(folder, ModelConfig(path="tiny", device="cpu"), trainable=True, spread=True), degrees)
    return str(caught.value)


def test_weights_that_are_not_finite_are_refused_by_every_rank(tmp_path):
    folder_of("dense", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][-1, -1] = float("nan")  # the last rank's
    save_file(weights, path, {"format": "pt"})
    for text in on_ranks(2, refused, tmp_path, ParallelConfig(shard=2)):
        assert "Qwen3ForCausalLM gives other logits" in text


def test_what_config_ties_and_files_have_twice_must_be_equal(tmp_path):
    folder_of("tied", tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    twice = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(twice, path, {"format": "pt"})
    on_ranks(2, loaded, tmp_path)
    twice["lm_head.weight"][-1] += 1  # the last rank's
    save_file(twice, path, {"format": "pt"})
    for text in on_ranks(2, refused, tmp_path, ParallelConfig(shard=2)):
        assert "ties model.embed_tokens.weight and lm_head.weight, but the files have two different tensors there" in text


def loaded(folder):
    backend_of(load_causal(folder, ModelConfig(path="tiny", device="cpu"), trainable=True, spread=True), ParallelConfig(shard=2))
