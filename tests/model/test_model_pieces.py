"""Parts of tensors that lie in one file or several are what indexing the whole would give, and no more of the files is read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.core_model_loading import Chunk, WeightConverter

from whet.model import contents as contents_module
from whet.model.causal import load_causal, random_causal
from whet.model.config import ModelConfig
from whet.model.pieces import Files, InFile, Joined, Stacked, taken

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}


class Held:
    """A part that is in memory."""

    def __init__(self, tensor):
        self.tensor, self.shape, self.source = tensor, tuple(tensor.shape), "memory"

    def read(self, kept):
        return taken(self.tensor, kept)


def indexed(tensor, kept):
    for dim, indices in enumerate(kept):
        tensor = tensor.index_select(dim, indices)
    return tensor


@given(st.data())
def test_a_part_of_what_is_put_together_is_that_part_of_the_whole(data):
    experts, rows, columns = (data.draw(st.integers(1, 4)) for _ in range(3))
    gates, ups = (torch.arange(experts * rows * columns).view(experts, rows, columns) + start for start in (0, 1000))
    whole = torch.cat([gates, ups], 1)
    piece = Joined([Stacked([Held(each) for each in stack], 0) for stack in (gates, ups)], 1)
    assert piece.shape == tuple(whole.shape)
    kept = [torch.tensor(sorted(data.draw(st.sets(st.integers(0, size - 1)))), dtype=torch.int64) for size in whole.shape]
    assert torch.equal(piece.read(kept), indexed(whole, kept))


def test_parts_that_do_not_fit_together_are_told():
    one, other = Held(torch.zeros(2, 3)), Held(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"shapes \(2, 3\), \(2, 4\)"):
        Stacked([one, other], 0)
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \(2, 4\), which cannot be joined along dimension 0"):
        Joined([one, other], 0)
    assert Joined([one, other], 1).shape == (2, 7)


def test_a_file_gives_parts_and_scalars(tmp_path):
    tensors = {"matrix": torch.arange(20.0).view(4, 5), "scalar": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    files = Files(tmp_path)
    kept = [torch.tensor([0, 2, 3]), torch.tensor([1, 4])]
    with files.opened():
        assert torch.equal(InFile(files, "matrix").read(kept), indexed(tensors["matrix"], kept))
        assert InFile(files, "scalar").read([]) == 3


def test_what_transformers_converts_in_a_way_of_its_own_is_read_whole_one_after_another(tmp_path, monkeypatch):
    """Queries, keys and values that a file has as one tensor."""
    config = ModelConfig(path="tiny", device="cpu")
    random_causal(LlamaConfig(**SIZES), config, seed=0).hf.save_pretrained(tmp_path)
    expected = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    weights = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        parts = [weights.pop(f"model.layers.{layer}.self_attn.{kind}_proj.weight") for kind in "qkv"]
        weights[f"model.layers.{layer}.self_attn.qkv.weight"] = torch.cat(parts)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    names = [f"self_attn.{kind}_proj.weight" for kind in "qkv"]
    monkeypatch.setattr(
        contents_module, "get_model_conversion_mapping", lambda _: [WeightConverter("self_attn.qkv.weight", names, [Chunk(0)])]
    )
    reads = []
    read = Files.read
    monkeypatch.setattr(Files, "read", lambda files, name, kept: reads.append(name) or read(files, name, kept))
    found = dict(load_causal(tmp_path, config, trainable=False).named_weights())
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert sorted(reads) == sorted(weights), "each once"
