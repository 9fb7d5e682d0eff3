from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from whet.core.nonfinite import NonFinite
from whet.observe.metrics import flatten
from whet.train.torch_native.config import OptimConfig
from whet.train.torch_native.optim import Optimizer, lr_at

SETTINGS = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.1}


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def inputs(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 6, generator=generator).to(dtype)


def backward(model, step, scale=1.0):
    dtype = next(model.parameters()).dtype
    (scale * model(inputs(step, dtype)).float().square().sum()).backward()


def reference(model, config, num_steps, total_steps, scale):
    """torch's own AdamW, without decay of vectors, and its own clipping."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    norms = []
    for step in range(num_steps):
        adamw.zero_grad()
        backward(model, step, scale)
        max_norm = config.clip_grad if config.clip_grad is not None else float("inf")
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        for group in adamw.param_groups:
            group["lr"] = lr_at(config, step, total_steps)
        adamw.step()
    return norms


@pytest.mark.parametrize("clip_grad", [None, 0.5, 1e6])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_in_float32_it_is_torchs_adamw_with_clipping(clip_grad, schedule):
    config = OptimConfig(**SETTINGS, clip_grad=clip_grad, schedule=schedule, warmup_steps=2)
    mine, theirs = network(), network()
    optimizer = Optimizer(mine.named_parameters(), config, 6)
    found = []
    for step in range(6):
        backward(mine, step, 3.0)
        metrics = flatten(optimizer.step())
        found.append(metrics["optim/grad_norm"])
        assert metrics["optim/lr"] == lr_at(config, step, 6)
        assert all(p.grad is None for p in mine.parameters())
    assert found == pytest.approx(reference(theirs, config, 6, 6, 3.0), rel=1e-6)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_gradients_of_several_backward_passes_add_up():
    one, two = network(), network()
    for model, parts in ((one, (1.0,)), (two, (0.25, 0.75))):
        optimizer = Optimizer(model.named_parameters(), OptimConfig(**SETTINGS), 1)
        for part in parts:
            backward(model, 0, part)
        optimizer.step()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_bfloat16_parameters_are_the_rounding_of_a_float32_run():
    config = OptimConfig(lr=1e-3, weight_decay=0.1)
    model = network(torch.bfloat16)
    optimizer = Optimizer(model.named_parameters(), config, 20)
    masters = {name: p.detach().float().clone().requires_grad_(True) for name, p in model.named_parameters()}
    groups = [
        {"params": [m for m in masters.values() if m.dim() >= 2], "weight_decay": 0.1},
        {"params": [m for m in masters.values() if m.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    shadow = copy.deepcopy(model)
    for step in range(20):
        backward(model, step)
        optimizer.step()
        shadow.zero_grad()
        backward(shadow, step)
        for name, p in shadow.named_parameters():
            masters[name].grad = p.grad.float()
        nn.utils.clip_grad_norm_(masters.values(), 1.0)
        adamw.step()
        with torch.no_grad():
            for name, p in shadow.named_parameters():
                p.copy_(masters[name])
    stuck = 0
    for name, p in model.named_parameters():
        assert p.dtype == torch.bfloat16
        torch.testing.assert_close(optimizer.tensors()[f"master/{name}"], masters[name].detach(), rtol=1e-6, atol=1e-8)
        assert torch.equal(p, masters[name].detach().to(torch.bfloat16)), name
        stuck += int((masters[name].detach() != p.float()).sum())
    assert stuck > 0, "masters that equal their rounding would prove nothing"


def test_micro_batch_gradients_of_bfloat16_parameters_add_up_in_float32():
    weight = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    optimizer = Optimizer([("weight", weight)], OptimConfig(clip_grad=None), 1)
    for gradient in [256.0] + [0.5] * 8:  # in bfloat16, 256 + 0.5 is 256
        (weight * gradient).sum().backward()
        assert weight.grad is None
    assert flatten(optimizer.step())["optim/grad_norm"] == 260.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_dropped(dtype, bad):
    model = network(dtype)
    optimizer = Optimizer(model.named_parameters(), OptimConfig(**SETTINGS), 9)
    backward(model, 0)
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    moments = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    (model[2].bias * bad).sum().backward()
    with pytest.raises(NonFinite, match=r"gradient norm is (nan|inf).*2\.bias"):
        optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(torch.equal(moments[name], tensor) for name, tensor in optimizer.tensors().items())
    assert optimizer.steps == 1
    backward(model, 1)
    assert 0 < flatten(optimizer.step())["optim/grad_norm"] < float("inf")


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_was_saved_goes_on_bit_for_bit(dtype, name, offload):
    config = OptimConfig(**SETTINGS, schedule="cosine", name=name)

    def run(model, optimizer, steps):
        for step in steps:
            backward(model, step)
            optimizer.step()

    whole = network(dtype)
    run(whole, Optimizer(layered(whole), config, 8, offload=offload), range(8))
    first = network(dtype)
    optimizer = Optimizer(layered(first), config, 8, offload=offload)
    run(first, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    kept = copy.deepcopy(saved)
    resumed = copy.deepcopy(first)
    second = Optimizer(layered(resumed), config, 8, offload=not offload)
    backward(resumed, 77)  # gradients from before the load must not count
    second.load_tensors(saved, 3)
    run(resumed, second, range(3, 8))
    assert all(torch.equal(kept[name], tensor) for name, tensor in saved.items()), "the run reaches into what it loaded"
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_loading_a_fresh_state_forgets_the_moments():
    model = network()
    optimizer = Optimizer(model.named_parameters(), OptimConfig(**SETTINGS), 8)
    fresh = optimizer.tensors()
    backward(model, 0)
    optimizer.step()
    optimizer.load_tensors(fresh, 0)
    assert optimizer.steps == 0 and not optimizer.adamw.state


def test_a_parameter_that_never_had_a_gradient_survives_the_round_trip():
    model = network()
    unused = nn.Parameter(torch.ones(2, 2))
    named = [*model.named_parameters(), ("unused", unused)]
    optimizer = Optimizer(named, OptimConfig(**SETTINGS), 8)
    backward(model, 0)
    optimizer.step()
    again = Optimizer(named, OptimConfig(**SETTINGS), 8)
    again.load_tensors(optimizer.tensors(), 1)
    assert again.tensors().keys() == optimizer.tensors().keys()
    assert unused not in again.adamw.state and unused.tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("exp_avg_sq/0.weight"), "has no exp_avg_sq of 0.weight"),
        (lambda t: t.pop("step/2.bias"), "has no step of 2.bias"),
        (lambda t: t.pop("master/2.bias"), "has no master of 2.bias"),
        (lambda t: t.update({"exp_avg/0.weight": torch.zeros(3)}), r"exp_avg of 0.weight as torch.float32 \(3,\), not"),
        (lambda t: t.update({"master/2.bias": torch.zeros(3).double()}), "as torch.float64 .* not torch.float32"),
    ],
)
def test_a_state_of_another_model_is_refused(change, message):
    model = network(torch.bfloat16)
    optimizer = Optimizer(model.named_parameters(), OptimConfig(**SETTINGS), 8)
    backward(model, 0)
    optimizer.step()
    tensors = dict(optimizer.tensors())
    change(tensors)
    with pytest.raises(ValueError, match=message):
        Optimizer(model.named_parameters(), OptimConfig(**SETTINGS), 8).load_tensors(tensors, 1)


def test_without_any_gradient_a_step_leaves_the_weights():
    model = network()
    before = copy.deepcopy(model.state_dict())
    assert flatten(Optimizer(model.named_parameters(), OptimConfig(**SETTINGS), 1).step())["optim/grad_norm"] == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def layered(model):
    """Parameters under names as a decoder's layers have them."""
    return [(f"layers.{name}", p) for name, p in model.named_parameters()]


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_in_the_cpus_memory_steps_the_same(dtype, name):
    config = OptimConfig(**SETTINGS, name=name)
    here, there = network(dtype), network(dtype)
    found = []
    for model, offload in ((here, False), (there, True)):
        optimizer = Optimizer(layered(model), config, 5, offload=offload)
        for step in range(5):
            for part in (0.25, 0.75):
                backward(model, step, part)
                assert all((p.grad is None) == (offload or dtype == torch.bfloat16) for p in model.parameters())
            optimizer.step()
        found.append(optimizer.tensors())
    assert all(torch.equal(a, b) for a, b in zip(here.parameters(), there.parameters(), strict=True))
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_muon_steps_layers_matrices_and_adamw_the_rest():
    """Newton-Schulz in float64 (arXiv 2502.16982, equation 2 and section 2.2), Nesterov's momentum, updates of AdamW's size."""
    config = OptimConfig(**SETTINGS, name="muon", clip_grad=None)
    model, plain = network(), network()
    named = [(f"layers.{name}" if name != "2.weight" else "head", p) for name, p in model.named_parameters()]
    optimizer = Optimizer(named, config, 3)
    adamw = Optimizer(plain.named_parameters(), OptimConfig(**SETTINGS, clip_grad=None), 3)
    weight, momentum = model[0].weight.detach().double().clone(), torch.zeros(8, 6, dtype=torch.float64)
    for step in range(3):
        for each in (model, plain):
            backward(each, step)
        grad = model[0].weight.grad.double()
        if step == 0:
            first = {name: p.grad.clone() for name, p in model.named_parameters()}
        momentum = momentum + (grad - momentum) * (1 - 0.95)
        update = newton_schulz(grad + (momentum - grad) * 0.95)
        weight = weight * (1 - config.lr * config.weight_decay) - config.lr * 0.2 * 8**0.5 * update
        optimizer.step()
        if step == 0:
            adamw.step()
            for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(a, b) == (name != "0.weight"), name
    assert first["0.weight"].abs().sum() > 0
    torch.testing.assert_close(model[0].weight.detach().double(), weight, rtol=2e-2, atol=2e-3)  # torch iterates in bfloat16


def newton_schulz(matrix):
    x = (matrix.T if matrix.shape[0] > matrix.shape[1] else matrix) / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def test_muons_momentum_is_for_those_who_use_it():
    with pytest.raises(ValueError, match=r"momentum=0.9 has no effect with name=adamw; set name=muon"):
        OptimConfig(momentum=0.9)
