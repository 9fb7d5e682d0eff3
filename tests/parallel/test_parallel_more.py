"""What else a backend does is the same on a mesh: annotation, checkpoints, adapters, critics, pairs, exports, refusals."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen3Config

from tests.parallel.ranks import on_ranks
from tests.parallel.tiny_models import SIZES, backend_of, model_of, relative, samples, step_of
from whet.algo.base import LossTerms, Need
from whet.algo.dpo import dpo_loss
from whet.algo.preference_config import DpoConfig
from whet.algo.sft import sft_loss
from whet.checkpoint.dcp import DcpReader
from whet.core.batch import batch_of
from whet.core.nonfinite import NonFinite
from whet.core.preference import pair_batch
from whet.core.weights import REDUCERS
from whet.model import dcp_files
from whet.model.causal import settle
from whet.model.config import LoraConfig, ModelConfig
from whet.model.scalar import ScalarModel
from whet.model.shards import whole
from whet.train.torch_native.config import ParallelConfig
from whet.types import UNSAMPLED, Origin, Pair, Sample

pytestmark = pytest.mark.long

SHARD = ParallelConfig(shard=2)
MIXED = ParallelConfig(context=2, tensor=2)


def weighed(data=None):
    batch = batch_of(samples() if data is None else data)
    return batch.with_(weights=REDUCERS["token_mean"](batch))


def with_nuclei(batch):
    """Every third trained token was drawn from a handful of ids."""
    generator = torch.Generator().manual_seed(3)
    sizes = torch.where(batch.loss_mask & (torch.arange(batch.num_tokens) % 3 == 0), 5, 0)
    ids = []
    for t in sizes.nonzero().squeeze(-1).tolist():
        others = torch.randperm(SIZES["vocab_size"], generator=generator)[:5]
        ids.append(others if batch.tokens[t] in others else torch.cat([others[:4], batch.tokens[t : t + 1]]))
    return batch.with_(nucleus_sizes=sizes, nucleus_ids=torch.cat(ids).int())


def annotate(degrees, kind, nuclei, settings):
    backend = backend_of(model_of(kind), degrees, None, **settings)
    batch = batch_of(samples())
    batch = with_nuclei(batch) if nuclei else batch
    for need in (Need.OLD_LOGPROBS, Need.SQUARED_PROBS):
        batch = backend.annotate(batch, need)
    return batch.old_logprobs, batch.squared_probs


@pytest.mark.parametrize("nuclei", [False, True])
@pytest.mark.parametrize(
    ("kind", "degrees", "settings"),
    [
        ("tied", SHARD, {}),
        ("dense", MIXED, {}),
        ("dense", ParallelConfig(context=2), {"rows": "forest"}),
        ("moe", ParallelConfig(shard=2, expert=2), {}),
    ],
)
def test_annotations_are_one_processes(kind, degrees, settings, nuclei):
    expected = annotate(None, kind, nuclei, settings)
    found = on_ranks(degrees.num_ranks, annotate, degrees, kind, nuclei, settings)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def learn(degrees, kind, settings, batch, loss, entropy_grad=False):
    backend = backend_of(model_of(kind), degrees, **settings)
    found = backend.forward_backward(batch, loss, entropy_grad=entropy_grad)
    params = backend.model.hf.named_parameters()
    return found.loss, {name: whole(p.grad).clone() for name, p in params if p.requires_grad}


def assert_learns_as_one_process(degrees, *args):
    expected_loss, expected = learn(None, *args)
    for loss, grads in on_ranks(degrees.num_ranks, learn, degrees, *args):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert grads.keys() == expected.keys()
        assert max(relative(grads[name], expected[name]) for name in expected) < 1e-5


@pytest.mark.parametrize("degrees", [SHARD, MIXED])
def test_what_tokens_were_drawn_from_is_replayed_on_a_mesh(degrees):
    assert_learns_as_one_process(degrees, "dense", {}, with_nuclei(weighed()), sft_loss)


def test_forests_are_shared_by_ranks():
    assert_learns_as_one_process(ParallelConfig(shard=2, context=2), "tied", {"rows": "forest"}, weighed(), sft_loss)


def test_fewer_samples_than_ranks_train_as_they_would_alone():
    assert_learns_as_one_process(ParallelConfig(shard=4), "moe", {}, weighed(samples()[:3]), sft_loss)


def pairs():
    def sample(prompt, reply):
        ids, mask = (*prompt, *reply), (False,) * len(prompt) + (True,) * len(reply)
        origin = (Origin.PROMPT,) * len(ids)
        return Sample(ids, origin, mask, (0.0,) * len(ids), (UNSAMPLED,) * len(ids), group="g", trajectory="t")

    generator = torch.Generator().manual_seed(0)

    def ids(count):
        return tuple(torch.randint(SIZES["vocab_size"], (count,), generator=generator).tolist())

    prompts = [ids(n) for n in (9, 5, 12, 3, 4)]
    return pair_batch([Pair(sample(p, ids(k + 2)), sample(p, ids(k + 3)), margin=0.25) for k, p in enumerate(prompts)])


@pytest.mark.parametrize("degrees", [SHARD, ParallelConfig(shard=4)])
def test_pairs_are_parted_by_no_rank(degrees):
    batch = pairs()
    batch = batch.with_(ref_logprobs=torch.linspace(-5, -4, batch.num_tokens) * batch.loss_mask)
    assert_learns_as_one_process(degrees, "dense", {}, batch, dpo_loss(DpoConfig(beta=0.7, sft_coef=0.3)))


def shared_out(degrees):
    """A rank's part of a batch that rank 0 alone has, and what the other ranks get of results."""
    backend = backend_of(model_of("dense"), degrees, max_tokens_per_device=40)
    batch = with_nuclei(weighed()) if dist.get_rank() == 0 else None
    share = backend._share(batch, None)
    found = backend.forward_backward(batch, sft_loss, per_token=True)
    annotated = backend.annotate(batch, Need.OLD_LOGPROBS)
    return share, found, annotated


@pytest.mark.parametrize("degrees", [SHARD, ParallelConfig(shard=3), ParallelConfig(shard=2, tensor=2), ParallelConfig(shard=2, context=2)])
def test_each_rank_gets_its_samples_and_rank_0_alone_whole_results(degrees):
    batch = with_nuclei(weighed())
    ranks = on_ranks(degrees.num_ranks, shared_out, degrees)
    one = degrees.num_ranks // degrees.num_data
    assert all(found[0].places == ranks[i - i % one][0].places for i, found in enumerate(ranks)), "ranks of one share"
    own = [place for share, _, _ in ranks[::one] for place in share.places[: share.num_own]]
    assert sorted(own) == list(range(batch.num_samples)), "each sample counts once"
    for i, (share, found, annotated) in enumerate(ranks):
        expected = batch.select(share.places).columns()
        assert share.batch.columns().keys() == expected.keys()
        assert all(torch.equal(column, expected[name]) for name, column in share.batch.columns().items())
        num_tokens = batch.num_tokens if i == 0 else share.batch.num_tokens
        assert num_tokens < batch.num_tokens or i == 0
        assert len(found.logprobs) == len(found.tokens.losses) == len(annotated.old_logprobs) == num_tokens
    whole_step, first = backend_of(model_of("dense"), None).forward_backward(batch, sft_loss, per_token=True), ranks[0][1]
    torch.testing.assert_close(first.logprobs, whole_step.logprobs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(first.tokens.losses, whole_step.tokens.losses, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(ranks[0][2].old_logprobs, whole_step.logprobs, rtol=1e-5, atol=1e-6)


def unplannable(degrees):
    backend = backend_of(model_of("dense"), degrees)
    backend.model.rotary_limit = 3
    with pytest.raises(ValueError) as caught:
        backend.annotate(weighed() if dist.get_rank() == 0 else None, Need.OLD_LOGPROBS)
    return str(caught.value)


def test_a_batch_that_cannot_be_laid_out_is_refused_on_every_rank():
    first, second = on_ranks(2, unplannable, SHARD)
    assert first == second and "3" in first


def scalar(degrees):
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, num_labels=1)
    model = settle(ScalarModel(AutoModelForSequenceClassification.from_config(config, attn_implementation="whet")), DTYPE, trainable=True)
    backend = backend_of(model, degrees)
    batch = backend.annotate(weighed(), Need.VALUES)

    def loss(part, out):
        return LossTerms((out.values - 1).square(), {})

    found = backend.forward_backward(batch, loss)
    return batch.values, batch.scores, found.loss, {name: whole(p.grad).clone() for name, p in model.hf.named_parameters()}


DTYPE = ModelConfig(path="tiny", device="cpu")


@pytest.mark.parametrize("degrees", [SHARD, ParallelConfig(shard=2, context=2), ParallelConfig(tensor=2)])
def test_a_critic_is_spread_like_a_policy(degrees):
    values, scores, expected_loss, expected = scalar(None)
    ranks = on_ranks(degrees.num_ranks, scalar, degrees)
    torch.testing.assert_close(ranks[0][0], values, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ranks[0][1], scores, rtol=1e-4, atol=1e-5)
    for found in ranks:
        assert found[2] == pytest.approx(expected_loss, rel=1e-5)
        assert max(relative(found[3][name], expected[name]) for name in expected) < 1e-5


def resumed(degrees, folder, resume):
    """Four AdamW steps, of which the last two may be another backend's, with other first weights, that loads the first's checkpoint."""
    algorithm, batch = step_of("grpo")

    def run(backend, steps):
        for _ in range(steps):
            backend.forward_backward(batch, algorithm.loss)
            backend.optim_step()

    settings = {"optim": {"lr": 1e-2, "schedule": "cosine", "weight_decay": 0.1}}
    backend = backend_of(model_of("moe" if degrees and degrees.expert > 1 else "tied"), degrees, **settings)
    run(backend, 2)
    if resume:
        backend.save(folder)
        other = model_of("moe" if degrees and degrees.expert > 1 else "tied")
        with torch.no_grad():
            for p in other.hf.parameters():
                p.add_(0.1)
        backend = backend_of(other, degrees, **settings)
        run(backend, 1)
        backend.load(folder)
    run(backend, 2)
    state = {name: whole(t).clone() for name, t in backend.optimizer.tensors().items()}
    return {name: w.detach().clone() for name, w in backend.named_weights()} | state, backend.optimizer.steps


@pytest.mark.parametrize(
    "degrees",
    [SHARD, *(pytest.param(ParallelConfig(**d), marks=pytest.mark.slow) for d in ({"shard": 2, "tensor": 2}, {"shard": 4, "expert": 2}))],
)
def test_a_checkpoint_of_a_mesh_goes_on_bit_for_bit(degrees, tmp_path):
    expected = on_ranks(degrees.num_ranks, resumed, degrees, tmp_path, False)
    found = on_ranks(degrees.num_ranks, resumed, degrees, tmp_path, True)
    for (a, steps), (b, resumed_steps) in zip(expected, found, strict=True):
        assert steps == resumed_steps == 4
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def moved(degrees, folder, what):
    """One optimizer step and a save, or a load."""
    backend = backend_of(model_of("tied"), degrees, optim={"lr": 1e-2})
    if what == "save":
        algorithm, batch = step_of("grpo")
        backend.forward_backward(batch, algorithm.loss)
        backend.optim_step()
        backend.save(folder)
    else:
        backend.load(folder)
    state = {name: whole(t).clone() for name, t in backend.optimizer.tensors().items()}
    return {name: w.detach().clone() for name, w in backend.named_weights()} | state


MOVES = [(None, SHARD), (SHARD, None), (SHARD, ParallelConfig(shard=2, tensor=2)), (MIXED, SHARD)]


@pytest.mark.parametrize(("first", "then"), MOVES)
def test_a_checkpoint_is_read_by_other_degrees(first, then, tmp_path):
    def run(degrees, what):
        return [moved(None, tmp_path, what)] if degrees is None else on_ranks(degrees.num_ranks, moved, degrees, tmp_path, what)

    expected = run(first, "save")[0]
    for found in run(then, "load"):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def read_damaged(degrees, folder):
    """What each rank hears when one of them reads a file that is cut short."""
    backend = backend_of(model_of("tied"), degrees, optim={"lr": 1e-2})
    backend.save(folder)
    if dist.get_rank() == 0:
        os.truncate(folder / "weights" / "__1_0.distcp", 100)
    dist.barrier()
    try:
        backend.load(folder)
    except ValueError as error:
        return str(error)
    return None


def test_every_rank_hears_of_a_part_that_one_cannot_read(tmp_path):
    told = on_ranks(2, read_damaged, SHARD, tmp_path)
    assert told[0] == told[1] and "rank 1: " in told[0] and "cannot be read: its file is cut short" in told[0], told


def exported(degrees, kind, dtype, folder):
    backend = backend_of(model_of(kind, dtype), degrees, None)
    backend.export(folder)
    return {name: w.detach().clone() for name, w in backend.named_weights()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "degrees"), [("tied", MIXED), ("moe", ParallelConfig(shard=2, tensor=2, expert=4))])
def test_an_export_of_a_mesh_is_the_models_own_folder(kind, degrees, dtype, tmp_path):
    expected = dict(model_of(kind, dtype).named_weights())
    for found in on_ranks(degrees.num_ranks, exported, degrees, kind, dtype, tmp_path):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    read = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").named_parameters())
    assert all(torch.equal(read[name], expected[name]) for name in expected)


def exported_with_biases(degrees, lora, folder):
    model = model_of("biased")
    for buffer in biases(model.hf).values():
        buffer.copy_(torch.arange(4) / 8)
    backend = backend_of(model, degrees, None, lora=LoraConfig(rank=2) if lora else None)
    (backend.export_merged if lora else backend.export)(folder)


def biases(hf):
    return {name: buffer for name, buffer in hf.named_buffers() if name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize(("degrees", "lora"), [(SHARD, False), (None, True)])
def test_an_export_holds_the_buffers_that_a_folder_has(degrees, lora, tmp_path):
    if degrees is None:
        exported_with_biases(None, lora, tmp_path)
    else:
        on_ranks(degrees.num_ranks, exported_with_biases, degrees, lora, tmp_path)
    read = biases(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"))
    assert read and all(torch.equal(buffer, torch.arange(4) / 8) for buffer in read.values())


def copied(degrees, kind):
    first, second = (backend_of(model_of(kind), degrees, None) for _ in range(2))
    with torch.no_grad():
        for p in first.model.hf.parameters():
            p.mul_(1.5)
    batch = batch_of(samples())
    second.annotate(batch, Need.REF_LOGPROBS)
    second.copy_weights(first)
    return first.annotate(batch, Need.REF_LOGPROBS).ref_logprobs, second.annotate(batch, Need.REF_LOGPROBS).ref_logprobs


@pytest.mark.parametrize(
    ("kind", "degrees"), [("tied", ParallelConfig(shard=2, tensor=2)), ("moe", ParallelConfig(shard=2, expert=2))]
)
def test_a_reference_becomes_a_copy_of_the_policy(kind, degrees):
    for policy, reference in on_ranks(degrees.num_ranks, copied, degrees, kind):
        assert torch.equal(policy, reference) and bool(policy.any())


@dataclass
class Source:
    """A model whose weights are a stream."""

    weights: Iterable[tuple[str, torch.Tensor]]

    def named_weights(self):
        return self.weights


def test_weights_are_taken_over_one_after_another():
    first, second = (backend_of(model_of("tied"), None, None) for _ in range(2))
    given = []

    def stream():
        for name, tensor in first.named_weights():
            assert sum(each() is not None for each in given) <= 1
            copy = tensor.detach() * 1.5
            given.append(weakref.ref(copy))
            yield name, copy
            del copy

    second.copy_weights(Source(stream()))
    own = dict(second.named_weights())
    assert all(torch.equal(own[name], tensor * 1.5) for name, tensor in first.named_weights()) and len(given) == len(own)
    lacking = list(first.named_weights())[1:]
    with pytest.raises(ValueError, match=r"what was to be copied is of another model: 2 names differ, among them"):
        second.copy_weights(Source([*lacking, ("other.weight", torch.zeros(1))]))


def poisoned(degrees):
    backend = backend_of(model_of("tied"), degrees)
    batch = weighed()
    last = int(batch.starts[7]) + int(batch.lengths[7]) - 1

    def loss(part, out):
        bad = (part.tokens == poison) & part.loss_mask
        return LossTerms(torch.where(bad, out.logprobs * float("nan"), -out.logprobs), {})

    tokens = torch.where(batch.tokens == 63, 1, batch.tokens)
    tokens[last], poison = 63, 63
    batch = batch.with_(tokens=tokens)
    with pytest.raises(NonFinite, match=r"loss of a micro-batch is nan \(1 tokens of the step's samples \[7\]\)"):
        backend.forward_backward(batch, loss)
    assert all(p.grad is None for p in backend.model.hf.parameters())
    backend.forward_backward(batch, sft_loss)
    return backend.optim_step()["optim/grad_norm"].value


def test_a_fault_on_one_rank_stops_all_and_names_its_samples():
    norms = on_ranks(2, poisoned, SHARD)
    assert norms[0] == norms[1] == pytest.approx(poisoned(None), rel=1e-5)


def in_bfloat16(degrees, settings):
    backend = backend_of(model_of("dense", "bfloat16"), degrees, **settings)
    found = backend.forward_backward(weighed(), sft_loss)
    grads = {name: whole(m.grad).float().clone() for name, m in backend.optimizer._masters.items()}
    dtypes = {m.dtype for m in backend.optimizer._masters.values()}
    return found.loss, grads, dtypes, {w.dtype for _, w in backend.named_weights()}


@pytest.mark.parametrize("degrees", [SHARD, ParallelConfig(shard=2, tensor=2)])
def test_bfloat16_is_computed_with_and_float32_is_kept(degrees):
    expected_loss, expected, *_ = in_bfloat16(None, {})
    for loss, grads, dtypes, given in on_ranks(degrees.num_ranks, in_bfloat16, degrees, {}):
        assert dtypes == {torch.float32} and given == {torch.bfloat16}
        assert loss == pytest.approx(expected_loss, rel=5e-3)
        for name, grad in expected.items():
            assert float((grads[name] - grad).norm() / grad.norm()) < 0.05, name


def in_float16(degrees):
    backend = backend_of(model_of("dense", "float16"), degrees, optim={"lr": 0.0})
    backend.forward_backward(weighed(), sft_loss)
    repeats = backend.optim_step()["optim/repeated_steps"].value
    backend.forward_backward(weighed(), sft_loss)
    grads = {name: whole(m.grad).float() / backend._scale.value for name, m in backend.optimizer._masters.items()}
    return repeats, backend._scale.state(), grads


@pytest.mark.parametrize("degrees", [SHARD, ParallelConfig(shard=2, tensor=2)])
def test_a_float16_step_that_overflows_is_repeated_by_all_ranks(degrees):
    repeats, _, expected = in_float16(None)
    ranks = on_ranks(degrees.num_ranks, in_float16, degrees)
    assert repeats >= 1 and all(found >= 1 and scale == ranks[0][1] for found, scale, _ in ranks)
    for _, _, grads in ranks:
        for name, grad in expected.items():
            assert float((grads[name] - grad).norm() / grad.norm()) < 0.02, name


def in_float64(matrix, coefficients, steps, eps):
    """Muon's iteration without its roundings to bfloat16, in which the last bit of a gradient shows."""
    a, b, c = coefficients
    x = matrix.double() if matrix.shape[0] <= matrix.shape[1] else matrix.double().T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if matrix.shape[0] <= matrix.shape[1] else x.T).to(matrix.dtype)


def stepped_by_muon(degrees, kind, folder=None):
    """Two steps, a checkpoint that another backend may go on from, and a third: the matrices that it stepped."""
    settings = {"optim": {"name": "muon", "lr": 1e-2, "weight_decay": 0.1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", in_float64)
        backend = backend_of(model_of(kind), degrees, **settings)
        for step in range(3):
            if step == 2 and folder is not None:
                backend.save(folder)
                backend = backend_of(model_of(kind), degrees, **settings)
                backend.load(folder)
            backend.forward_backward(weighed(), sft_loss)
            backend.optim_step()
    optimizer = backend.optimizer
    return {name: whole(m).detach().clone() for name, m in optimizer._masters.items() if id(m) in optimizer._of_other}


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [("dense", SHARD), ("dense", ParallelConfig(shard=2, tensor=2)), ("moe", ParallelConfig(shard=2, expert=2))],
)
def test_muon_steps_matrices_that_are_cut_as_whole_ones(kind, degrees, tmp_path):
    first, expected = dict(model_of(kind).hf.named_parameters()), stepped_by_muon(None, kind)
    for found in on_ranks(degrees.num_ranks, stepped_by_muon, degrees, kind, tmp_path):
        assert found.keys() == expected.keys() and len(found) >= 8
        for name, matrix in expected.items():
            assert relative(found[name], matrix) < 1e-4 < 1e-2 < relative(first[name].detach(), matrix), name


def refused(degrees, kind, settings):
    with pytest.raises(ValueError) as caught:
        backend_of(model_of(kind), degrees, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("num_ranks", "degrees", "kind", "settings", "words"),
    [
        (2, {"shard": 4}, "dense", {}, ["shard (4)", "is 4, but the processes of this job are 2", "torchrun --nproc-per-node 4"]),
        (4, {"tensor": 4}, "dense", {}, ["4 heads and 2 of keys and values", "lower tensor"]),
        (2, {"shard": 2, "expert": 2}, "dense", {}, ["Qwen3ForCausalLM has no plan for it"]),
        (2, {"context": 2, "context_attention": "gather"}, "dense", {"rows": "forest"}, ["train.rows is forest", "use train.rows=chains"]),
    ],
)
def test_what_cannot_be_spread_is_refused_with_the_remedy(num_ranks, degrees, kind, settings, words):
    for text in on_ranks(num_ranks, refused, ParallelConfig(**degrees), kind, settings):
        assert all(word in text for word in words), text


def test_experts_are_spread_over_whole_groups():
    with pytest.raises(ValueError, match=r"expert is 2, but it must be a multiple of tensor \(4\) that divides .* \(8\)"):
        ParallelConfig(shard=2, tensor=4, expert=2)


def with_bias(value, degrees=None):
    model = model_of("biased")
    with torch.no_grad():
        for _, buffer in model.saved_buffers():
            buffer.fill_(value)
    return backend_of(model, degrees)


def load_with_bias(folder, value, degrees):
    with_bias(value, degrees).load(folder)


def test_weights_are_not_loaded_beside_other_buffers(tmp_path):
    with_bias(0.25).save(tmp_path)
    load_with_bias(tmp_path, 0.25, None)
    on_ranks(2, load_with_bias, tmp_path, 0.25, SHARD)
    with pytest.raises(ValueError, match=r"buffers\.safetensors is of another model: its buffer model\..*e_score_correction_bias is not"):
        load_with_bias(tmp_path, 0.5, None)
    (name, _), *_ = with_bias(0.5).model.saved_buffers()
    with pytest.raises(AssertionError, match=f"its buffer {name} is not that"):
        on_ranks(2, load_with_bias, tmp_path, 0.5, SHARD)


def staged(degrees, folder):
    """What `stage` holds is written after another step was made; and again where the second rank's disk is full."""
    backend = backend_of(model_of("tied"), degrees, optim={"lr": 1e-2})
    algorithm, batch = step_of("grpo")

    def step():
        backend.forward_backward(batch, algorithm.loss)
        backend.optim_step()

    step()
    backend.save(folder / "at_once")
    write = backend.stage(folder / "later")
    step()
    write()
    told = None
    if dist.get_rank() == 1:
        FileSystemWriter.write_data = full_disk
    try:
        backend.stage(folder / "full")()
    except OSError as error:
        told = str(error)
    return told


def full_disk(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_staged_mesh_is_written_as_it_was_then_and_every_rank_hears_of_one_that_cannot_write(tmp_path):
    told = on_ranks(2, staged, SHARD, tmp_path)
    assert len(told) == 2 and all(text is not None and "rank 1: No space left on device" in text for text in told), told
    for name in ("weights", "optimizer"):
        mine, theirs = (DcpReader(tmp_path / which / name) for which in ("later", "at_once"))
        assert mine.names == theirs.names
        assert all(torch.equal(mine.read(each), theirs.read(each)) for each in mine.names)


def saved_apart(degrees, folder):
    """Each rank sees a file system of its own under the same path."""
    dcp_files.SEEN_S = 0.3
    try:
        backend_of(model_of("tied"), degrees).save(folder / f"machine {dist.get_rank()}")
    except OSError as error:
        return str(error)
    return None


def test_shards_that_the_first_rank_does_not_see_are_no_checkpoint(tmp_path):
    first, _ = on_ranks(2, saved_apart, SHARD, tmp_path)
    assert first is not None and "lacks 1 of 2 files" in first and "__1_0.distcp" in first and "file system that all of them share" in first


def said(degrees):
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger("torch.distributed.tensor").addHandler(handler)
    backend = backend_of(model_of("tied"), degrees)
    backend.forward_backward(weighed(), sft_loss)
    backend.optim_step()
    assert list(backend.named_weights())
    return [record.getMessage() for record in records]


def test_a_step_says_nothing_of_how_torch_lays_out_meshes():
    assert on_ranks(2, said, ParallelConfig(tensor=2)) == [[], []]
