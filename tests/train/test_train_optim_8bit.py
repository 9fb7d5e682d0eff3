"""AdamW with moments of eight bits: torchao's steps bit for bit, near float64's, saved and restored as they are, planned."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torchao.optim import AdamW8bit as TheirAdamW8bit

from tests.train.tiny_policy import qwen3
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.plan.memory import Workload, optimizer_bytes, optimizer_parts
from whet.train.torch_native import optim_8bit
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import OptimConfig, TrainConfig
from whet.train.torch_native.optim import Optimizer, lr_at
from whet.train.torch_native.optim_8bit import Blocks, blocks_of, check_blocks

SHAPES = {"rows": (32, 512), "across": (48, 96), "stack": (3, 16, 256), "small": (16, 32), "vector": (8192,)}
CONFIG = OptimConfig(name="adamw_8bit", lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, schedule="cosine", warmup_steps=2, clip_grad=2.0)
STEPS = 8


@pytest.fixture(autouse=True)
def several_pieces(monkeypatch):
    monkeypatch.setattr(optim_8bit, "PIECE", 2048)


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in SHAPES.items()}


def gradients(step, least=0.05):
    """Of entries whose sizes differ, as a model's do; none is less than a share `least` of what is usual."""
    draw = torch.Generator().manual_seed(step)
    sizes = torch.Generator().manual_seed(99)
    out = {}
    for name, shape in SHAPES.items():
        noise = torch.randn(shape, generator=draw)
        out[name] = (noise + least * noise.sign()) * torch.randn(shape, generator=sizes).mul(0.5).exp() * 1e-3
    return out


def give(params, step):
    """Gradients through a backward pass, so that masters collect them."""
    sum((p * g.to(p.dtype)).sum() for p, g in zip(params.values(), gradients(step).values(), strict=True)).backward()


def run(params, optimizer, steps):
    for step in steps:
        give(params, step)
        optimizer.step()


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((32, 512), Blocks("256", (32, 2))),
        ((2, 16, 256), Blocks("256", (2, 16, 1))),
        ((48, 96), Blocks("8x96", (6, 3))),
        ((4864, 896), Blocks("2x896", (2432, 7))),
        ((8, 40, 24), Blocks("4x40x24", (2, 15))),
        ((16, 255), None),  # fewer than 4096
        ((17, 256), Blocks("256", (17, 1))),
        ((65, 64), None),  # no whole number of blocks
        ((8192,), None),
    ],
)
def test_blocks_are_whole_runs_of_256_entries(shape, blocks):
    p = torch.empty(shape, device="meta")
    assert blocks_of(p) == blocks
    assert blocks_of(p.bfloat16()) is None and blocks_of(p.double()) is None
    if blocks is not None:
        assert math.prod(blocks.scales) * 256 == p.numel()


def test_its_steps_are_torchaos_bit_for_bit_and_the_rest_are_adamws():
    config = CONFIG.model_copy(update={"clip_grad": None})
    mine, theirs, plain = parameters(), parameters(), parameters()
    optimizer = Optimizer(mine.items(), config, STEPS)
    adamw = Optimizer(plain.items(), config.model_copy(update={"name": "adamw"}), STEPS)
    reference = TheirAdamW8bit([theirs[name] for name in ("rows", "across", "stack")], lr=0.0, betas=config.betas, weight_decay=0.1)
    for step in range(STEPS):
        run(plain, adamw, [step])
        give(theirs, step)
        run(mine, optimizer, [step])
        reference.param_groups[0]["lr"].fill_(lr_at(config, step, STEPS))
        with torch.compiler.set_stance("force_eager"):
            reference.step()
        for p in theirs.values():
            p.grad = None
    kept = optimizer.tensors()
    for name, tag in (("rows", "256"), ("across", "8x96"), ("stack", "256")):
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-6, atol=1e-7)
        state = reference.state[theirs[name]]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(kept[f"{moment}.codes/{name}"], state[moment].codes)
            assert torch.equal(kept[f"{moment}.scale.{tag}/{name}"].flatten(), state[moment].scale)
            assert f"{moment}/{name}" not in kept
        assert not torch.equal(mine[name], plain[name])
    for name in ("small", "vector"):
        assert torch.equal(mine[name], plain[name])
        assert torch.equal(kept[f"exp_avg/{name}"], adamw.tensors()[f"exp_avg/{name}"])


def test_an_entry_whose_gradient_is_small_and_then_gone_moves_no_further_than_float32s():
    """torchao's own moves it by hundreds of learning rates, since its second moment is rounded to 0 and its first is not."""
    grad = torch.full((16, 256), 1.0)
    grad[:, ::2] = 1e-4
    config = OptimConfig(name="adamw_8bit", lr=0.01, clip_grad=None)
    moved = {}
    for name in ("adamw_8bit", "adamw", "torchao"):
        p = nn.Parameter(torch.zeros(16, 256))
        if name == "torchao":
            stepper = TheirAdamW8bit([p], lr=0.01, weight_decay=0.0)
        else:
            stepper = Optimizer([("p", p)], config.model_copy(update={"name": name}), 2)
        for share in (1.0, 0.0):
            p.grad = grad * torch.where(grad < 1, share, 1.0)
            with torch.compiler.set_stance("force_eager"):
                stepper.step()
        moved[name] = float(p.detach()[0, 0].abs())
    assert moved["torchao"] > 1.0 and moved["adamw_8bit"] <= moved["adamw"] < 0.02


def test_its_steps_are_near_those_of_float64():
    """arXiv 1711.05101, algorithm 2, with clipping to a norm: moments are rounded to 1 part in 100 of their block's largest or so."""
    params = parameters()
    start = {name: p.detach().double() for name, p in params.items()}
    weights, first, second = dict(start), *({name: torch.zeros_like(p) for name, p in start.items()} for _ in range(2))
    optimizer = Optimizer(params.items(), CONFIG, STEPS)
    for step in range(STEPS):
        run(params, optimizer, [step])
        grads = {name: g.double() for name, g in gradients(step).items()}
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
        lr = lr_at(CONFIG, step, STEPS)
        for name, g in grads.items():
            g = g * min(1.0, 2.0 / norm)
            first[name] = 0.9 * first[name] + 0.1 * g
            second[name] = 0.98 * second[name] + 0.02 * g * g
            update = first[name] / (1 - 0.9 ** (step + 1)) / ((second[name] / (1 - 0.98 ** (step + 1))).sqrt() + CONFIG.eps)
            weights[name] = weights[name] * (1 - lr * (0.1 if g.dim() > 1 else 0.0)) - lr * update
    for name, p in params.items():
        moved, expected = p.detach().double() - start[name], weights[name] - start[name]
        assert float((moved - expected).norm() / expected.norm()) < (0.03 if blocks_of(p) is not None else 1e-4), name


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_saved_goes_on_bit_for_bit(dtype, offload):
    whole = parameters(dtype)
    run(whole, Optimizer(whole.items(), CONFIG, STEPS, offload=offload), range(STEPS))
    first = parameters(dtype)
    optimizer = Optimizer(first.items(), CONFIG, STEPS, offload=offload)
    run(first, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    assert saved.keys() == optimizer.possible_tensors().keys()
    kept, resumed = copy.deepcopy(saved), copy.deepcopy(first)
    second = Optimizer(resumed.items(), CONFIG, STEPS, offload=not offload)
    run(resumed, second, [77])  # of before the load
    for name, p in resumed.items():
        p.data.copy_(first[name])
    second.load_tensors(saved, 3)
    assert {name: t.dtype for name, t in second.tensors().items()} == {name: t.dtype for name, t in saved.items()}
    run(resumed, second, range(3, STEPS))
    assert all(torch.equal(kept[name], tensor) for name, tensor in saved.items()), "the run reaches into what it loaded"
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_parameter_that_never_had_a_gradient_has_no_moments():
    params = parameters()
    optimizer = Optimizer(params.items(), CONFIG, STEPS)
    (params["rows"] * gradients(0)["rows"]).sum().backward()
    optimizer.step()
    kept = optimizer.tensors()
    assert "exp_avg.codes/rows" in kept and kept["step/across"] == 0 and "exp_avg.codes/across" not in kept
    optimizer.load_tensors(kept, 1)
    assert optimizer.tensors().keys() == kept.keys()


def backend_of(name):
    model = random_causal(qwen3(), ModelConfig(path="x", device="cpu"), seed=0)
    return TorchBackend(model, TrainConfig(optim=OptimConfig(name=name)), total_steps=3)


@pytest.mark.parametrize(("saved", "wanted"), [("adamw", "muon"), ("muon", "adamw"), ("adamw", "adamw_8bit"), ("adamw_8bit", "muon")])
def test_a_checkpoint_of_another_optimizer_is_refused(saved, wanted, tmp_path):
    backend_of(saved).save(tmp_path)
    backend_of(saved).load(tmp_path)
    with pytest.raises(ValueError, match=f"is of optim.name={saved}, and this run has optim.name={wanted}: set it to {saved}, or begin"):
        backend_of(wanted).load(tmp_path)
    backend_of(wanted).load(tmp_path, optimizer=False)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["exp_avg.codes", "exp_avg.scale.2x128"], "in blocks of 2x128 entries, and this layout has them in blocks of 256 entries"),
        (["exp_avg", "exp_avg_sq"], "in float32, and this layout has them in blocks of 256 entries"),
    ],
)
def test_moments_in_other_blocks_are_refused(keys, words):
    with pytest.raises(ValueError, match=f"has the moments of rows {words}.*Resume with the layout that it was saved with"):
        check_blocks([f"{key}/rows" for key in keys], parameters())
    check_blocks(["step/rows"], parameters())


def test_without_torchao_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(optim_8bit, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs the torchao package: pip install 'whet\[8bit\]', or use adamw"):
        Optimizer(parameters().items(), CONFIG, 1)


def test_memory_is_planned_with_codes_and_scales_and_a_piece_at_a_time(monkeypatch):
    monkeypatch.setattr(optim_8bit, "PIECE", 2**22)
    num = 2**24
    trained = {"a": torch.empty(2**12, 2**12, device="meta"), "norm": torch.empty(2**12, device="meta")}
    eight, full = (optimizer_bytes(trained, TrainConfig(optim=OptimConfig(name=name))) for name in ("adamw_8bit", "adamw"))
    assert eight.moments == 2 * (num + 4 * num // 256) + 8 * 2**12
    assert full.moments == 8 * (num + 2**12)
    assert 2**24 < eight.scratch < 2**28 and eight.gradients == full.gradients
    parts = optimizer_parts(trained, Workload(TrainConfig(optim=OptimConfig(name="adamw_8bit"), offload=True), (10,), offloaded=True))
    assert [part.name for part in parts] == ["gradients"]
