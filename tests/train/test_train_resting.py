"""A frozen model whose weights rest in the CPU's memory: the same numbers, and nothing on the device in between."""

import torch

from tests.train.tiny_policy import policy
from whet.model.attention import PackedRow
from whet.train.torch_native.resting import RestingWeights


def outputs(model):
    row = PackedRow([4], model.device)
    return model.logits(model.hidden(torch.tensor([5, 4, 60, 17], device=model.device), row.positions, row))


def places(model):
    return [p.data_ptr() for p in model.hf.parameters()]


def test_weights_are_copied_for_the_passes_and_let_go():
    model = policy()
    with torch.no_grad():
        expected = outputs(model)
        device = model.device
        resting = RestingWeights(model)
        at_rest = places(model)
        with resting.awake():
            assert not set(places(model)) & set(at_rest)
            assert torch.equal(outputs(model), expected)
        assert places(model) == at_rest and model.device == device
        for p in model.hf.parameters():  # a reference that is brought up to date changes what rests
            p.zero_()
        with resting.awake():
            assert not any(bool(p.any()) for p in model.hf.parameters())
