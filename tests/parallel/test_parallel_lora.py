"""An adapter on a mesh: the loss, gradients, steps, merged weights and files of one process, on a base that stays as it is."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.parallel.ranks import on_ranks
from tests.parallel.tiny_models import STEPS, backend_of, model_of, relative, step_of
from whet.algo.base import Need
from whet.model.config import LoraConfig
from whet.model.shards import spread_like, whole
from whet.train.torch_native.config import ParallelConfig

pytestmark = pytest.mark.long

LORA = LoraConfig(rank=4, alpha=8.0)


def adapted(kind, degrees, settings):
    """A backend whose adapter is not the new one that adds nothing: B is drawn, too."""
    torch.manual_seed(0)
    model = model_of(kind, gradient_checkpointing=settings.get("recompute", False))
    backend = backend_of(model, degrees, lora=LORA, **{key: value for key, value in settings.items() if key != "recompute"})
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in sorted(backend.adapter.tensors().items()):
            if ".lora_B." in name:
                tensor.copy_(spread_like(torch.randn(tensor.shape, generator=draw) * 0.1, tensor))
    return backend


def learned(kind, degrees, folder, settings):
    """What a first step finds, and what three of clipped SGD leave."""
    backend = adapted(kind, degrees, settings)
    backend.optimizer.adamw = torch.optim.SGD([{"params": list(g["params"])} for g in backend.optimizer.adamw.param_groups], lr=0.0)
    algorithm, batch = step_of("grpo")
    out = {"reference": backend.base().annotate(batch, Need.REF_LOGPROBS).ref_logprobs, "digest": backend.adapter.base_digest()}
    for step in range(STEPS):
        found = backend.forward_backward(batch, algorithm.loss)
        if step == 0:
            out |= {"loss": found.loss, "logprobs": found.logprobs, "flops": backend.flops}
            out["grads"] = {name: whole(t.grad).clone() for name, t in backend.adapter.tensors().items()}
        norm = backend.optim_step()["optim/grad_norm"].value
        out.setdefault("norm", float(norm))
    backend.export(folder, "base")
    for kind in ("merged", "adapter"):
        out[kind] = {name: t.detach().clone() for name, t in backend.named_weights(kind)}
    assert out["digest"] == backend.adapter.base_digest()
    return out


@pytest.mark.parametrize(
    ("kind", "degrees", "settings"),
    [
        ("dense", {"tensor": 2}, {}),
        ("moe", {"shard": 2, "expert": 2}, {}),
        *(
            pytest.param(kind, degrees, settings, marks=pytest.mark.slow)
            for kind, degrees, settings in [
                ("tied", {"shard": 2}, {}),
                ("tied", {"shard": 2, "tensor": 2}, {"recompute": True}),
                ("moe", {"shard": 2, "tensor": 2, "expert": 2}, {}),
                ("dense", {"shard": 2, "tensor": 2}, {"offload": True}),
                ("dense", {"context": 2, "tensor": 2}, {}),
                ("moe", {"tensor": 2}, {}),
                ("moe", {"tensor": 2, "expert": 2}, {}),
                ("moe", {"context": 2, "tensor": 2, "expert": 4}, {}),
                ("biased", {"shard": 2, "tensor": 2}, {}),
                ("biased", {"shard": 2, "expert": 2}, {}),
                ("tied", {"replicate": 2, "tensor": 2}, {"recompute": "selective"}),
            ]
        ),
    ],
)
def test_an_adapter_learns_as_in_one_process(kind, degrees, settings, tmp_path):
    degrees = ParallelConfig(**degrees)
    expected = learned(kind, None, tmp_path / "alone", {key: value for key, value in settings.items() if key != "offload"})
    assert float(torch.stack([g.abs().max() for g in expected["grads"].values()]).min()) > 0
    for rank, found in enumerate(on_ranks(degrees.num_ranks, learned, kind, degrees, tmp_path / "mesh", settings)):
        assert found["digest"] == expected["digest"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert found["flops"] == expected["flops"]
        for column in ("reference", "logprobs") if rank == 0 else ():  # it alone has all tokens
            torch.testing.assert_close(found[column], expected[column], rtol=1e-5, atol=1e-5)
        for part in ("grads", "merged", "adapter"):
            assert found[part].keys() == expected[part].keys()
            for name, tensor in expected[part].items():
                assert relative(found[part][name], tensor) < 1e-5, (part, name)
    mine, theirs = (load_file(tmp_path / where / "adapter_model.safetensors") for where in ("mesh", "alone"))
    assert mine.keys() == theirs.keys() and max(relative(mine[name], theirs[name]) for name in theirs) < 1e-5
    described = [(tmp_path / where / "adapter_config.json").read_text() for where in ("mesh", "alone")]
    assert described[0] == described[1]


def resumed(degrees, kind, folder, resume):
    """Four AdamW steps, of which the last two may be another backend's that loads the first's checkpoint."""
    algorithm, batch = step_of("grpo")

    def run(backend, steps):
        for _ in range(steps):
            backend.forward_backward(batch, algorithm.loss)
            backend.optim_step()

    settings = {"optim": {"lr": 1e-2, "weight_decay": 0.1}}
    backend = adapted(kind, degrees, settings)
    run(backend, 2)
    if resume:
        backend.save(folder)
        backend = adapted(kind, degrees, settings)
        run(backend, 1)
        backend.load(folder)
    run(backend, 2)
    return {name: t.detach().clone() for name, t in backend.named_weights("adapter")}


def loaded(degrees, kind, folder):
    backend = adapted(kind, degrees, {})
    backend.load(folder)
    return {name: t.detach().clone() for name, t in backend.named_weights("adapter")}


@pytest.mark.parametrize(
    ("kind", "degrees"), [("moe", {"shard": 2, "expert": 2}), pytest.param("dense", {"shard": 2, "tensor": 2}, marks=pytest.mark.slow)]
)
def test_an_adapters_checkpoint_goes_on_bit_for_bit_and_is_read_by_one_process(kind, degrees, tmp_path):
    degrees = ParallelConfig(**degrees)
    expected = on_ranks(degrees.num_ranks, resumed, degrees, kind, tmp_path, False)
    found = on_ranks(degrees.num_ranks, resumed, degrees, kind, tmp_path, True)
    for a, b in zip(expected, found, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    alone = loaded(None, kind, tmp_path)
    for there in on_ranks(degrees.num_ranks, loaded, degrees, kind, tmp_path):
        assert all(torch.equal(there[name], alone[name]) for name in alone)


def digest(degrees):
    return backend_of(model_of("dense", "bfloat16"), degrees, lora=LORA).adapter.base_digest()


def test_the_base_of_a_bfloat16_mesh_is_that_of_one_process():
    assert set(on_ranks(2, digest, ParallelConfig(tensor=2))) == {digest(None)}


def drawn(degrees):
    torch.manual_seed(0)
    torch.rand(3 - 2 * dist.get_rank())  # as a reward function of the user's may, which the first rank alone imports
    backend = backend_of(model_of("dense"), degrees, lora=LORA)
    return {name: t.detach().clone() for name, t in backend.named_weights("adapter")}


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"replicate": 2}, {"shard": 2}])
def test_an_adapter_is_the_same_on_all_ranks_whatever_they_drew_before(degrees):
    first, second = on_ranks(2, drawn, ParallelConfig(**degrees))
    torch.manual_seed(0)
    torch.rand(3)
    expected = dict(backend_of(model_of("dense"), None, lora=LORA).named_weights("adapter"))
    assert all(torch.equal(first[name], expected[name]) and torch.equal(second[name], expected[name]) for name in expected)


def merged(degrees, folder):
    backend = backend_of(model_of("tied", "bfloat16"), degrees, lora=LORA)
    backend.export_merged(folder)
    return {name: t.detach().clone() for name, t in backend.named_weights()}


@pytest.mark.parametrize("degrees", [None, ParallelConfig(shard=2)])
def test_a_merged_folder_has_the_models_type_whatever_its_ranks_keep(degrees, tmp_path):
    (own, *_) = [merged(None, tmp_path)] if degrees is None else on_ranks(2, merged, degrees, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    read = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").named_parameters())
    assert read.keys() == own.keys() and all(torch.equal(read[name], own[name]) for name in own)


def test_no_more_than_one_tensor_of_the_base_is_whole_at_a_time(monkeypatch):
    backend = backend_of(model_of("dense"), None, lora=LORA)
    given = []

    def put_together(tensor):
        assert sum(each() is not None for each in given) <= 1
        copy = tensor.clone()
        given.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr("whet.model.lora.whole", put_together)
    backend.adapter.base_digest()
    assert len(given) > 10
