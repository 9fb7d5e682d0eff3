"""A model's own tensors, put together of what files have of them."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig

from whet.model.config import ModelConfig
from whet.model.meta import meta_causal
from whet.model.naming import Box, Naming, Scattered, place_in

ORDER = torch.arange(4 * 6 * 5).view(4, 6, 5)


@pytest.mark.parametrize(
    ("places", "kind"),
    [
        (ORDER[2], Box),
        (ORDER[1, 3:], Box),
        (ORDER[1:3, :, 2:4], Box),
        (ORDER[1, :, 2:4].reshape(-1), Box),
        (ORDER[1].T, Scattered),
        (ORDER[::2], Scattered),
        (ORDER.flip(1), Scattered),
        (ORDER[:0], Scattered),
    ],
)
def test_a_part_is_put_where_it_lies(places, kind):
    whole, out = torch.randn(ORDER.shape), torch.zeros(ORDER.shape)
    found = place_in(ORDER, places)
    assert type(found) is kind and found.shape == places.shape
    found.put(whole.view(-1)[places], out)
    wanted = torch.zeros(ORDER.numel())
    wanted[places.reshape(-1)] = whole.view(-1)[places.reshape(-1)]
    assert torch.equal(out.view(-1), wanted)


def test_layers_that_are_alike_are_asked_for_once(monkeypatch):
    """And each gets its own entries."""
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 8, "vocab_size": 30}
    naming = Naming(meta_causal(Qwen3MoeConfig(**shape, **experts), ModelConfig(path="", device="cpu")))
    names = [name for name in naming.own if "gate_up_proj" in name]
    own = {name: torch.randn(naming.own[name].shape) for name in names}
    files = {file: part.clone() for name, tensor in own.items() for file, part in naming.to_files(name, tensor)}
    asked = []
    monkeypatch.setattr("whet.model.naming.place_in", lambda *given: asked.append(1) or place_in(*given))
    for name in names:
        assert torch.equal(naming.from_files(name, files.__getitem__), own[name])
    assert len(names) == 3 and len(asked) == len(naming.files[names[0]]) == 8
    with pytest.raises(ValueError, match=r"experts.0.gate_proj.weight has the shape \(3,\), not the model's \(8, 16\)"):
        naming.from_files(names[0], lambda _: torch.zeros(3))
