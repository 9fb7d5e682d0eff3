"""Routing replay: the experts that an engine or an earlier pass chose are those of the trainer's passes, and the gradient is of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.train.tiny_mixture import EXPERTS, LAYERS, TOP_K, batch_from, gates_of, mixture, plain, play, unsteady
from tests.train.tiny_policy import gradients, policy, relative
from whet.algo.base import Need
from whet.algo.sft import sft_loss
from whet.core.batch import own_routes
from whet.rollout.samples import samples_of
from whet.train.routing import replay_metrics
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig

TOLERANCE = {"float64": 2e-6, "float32": 2e-5}
"""Of log-probs: Qwen3's routers compute weights in float32 whatever the model's type, and an engine hands log-probs over in it."""


def backend(model, replay, *, rows="chains", budget=1000, steps=1):
    return TorchBackend(model, TrainConfig(rows=rows, max_tokens_per_device=budget, logprob_chunk_tokens=7, routing_replay=replay), steps)


@pytest.fixture(scope="module")
def played():
    model = mixture()
    unsteady(model)
    return play(model)


def furthest(batch, found):
    return float((found - batch.rollout_logprobs)[batch.loss_mask].abs().max())


@pytest.mark.parametrize("rows", ["chains", "forest"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_trainer_s_log_probs_are_those_of_an_engine_that_breaks_ties_otherwise(played, dtype, rows):
    batch = batch_from(played)
    assert batch.routes.shape == (batch.num_tokens, LAYERS, TOP_K) and batch.routes.dtype == torch.uint8
    own = own_routes(batch)
    assert int((own == 0).any(-1).any(-1).sum()) == batch.num_samples, "of the last tokens alone nobody reported"
    with_replay = backend(mixture(dtype=dtype), "rollout", rows=rows, budget=70).annotate(batch, Need.OLD_LOGPROBS).old_logprobs
    without = backend(mixture(dtype=dtype), "off", rows=rows, budget=70).annotate(batch, Need.OLD_LOGPROBS).old_logprobs
    assert furthest(batch, with_replay) < TOLERANCE[dtype]
    assert furthest(batch, without) > 0.05, "the choices were meant to differ"


@pytest.mark.parametrize("recompute", [False, True, "selective"])
@pytest.mark.parametrize("rows", ["chains", "forest"])
def test_loss_and_gradient_are_those_of_the_chosen_experts(played, rows, recompute):
    batch = batch_from([*played, played[0]])
    model = mixture(gradient_checkpointing=recompute)
    found = backend(model, "rollout", rows=rows, budget=90).forward_backward(batch, sft_loss)
    grads = gradients(model)
    told: list[torch.Tensor] = [torch.empty(0)] * LAYERS
    twin, loss, expected, place = plain(model, told), 0.0, [], 0
    for sample in (s for t in [*played, played[0]] for s in samples_of(t)):
        experts = torch.tensor(sample.routes.numpy().astype(int)).roll(-1, 0) - 1
        experts[-1] = torch.arange(TOP_K)  # the last token predicts nothing
        told[:] = experts.unbind(1)
        table = twin(input_ids=torch.tensor([list(sample.tokens)])).logits[0].log_softmax(-1)
        for t, (before, token) in enumerate(pairwise([0, *sample.tokens])):
            if sample.loss_mask[t]:
                expected.append(table[t - 1, token])
                loss = loss - batch.weights[place + t].double() * expected[-1]
            del before
        place += len(sample.tokens)
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    torch.testing.assert_close(found.logprobs[batch.loss_mask].double(), torch.stack(expected).detach(), rtol=1e-5, atol=1e-6)
    assert any("gate.weight" in name and float(p.grad.abs().max()) > 0 for name, p in twin.named_parameters())
    for name, p in twin.named_parameters():
        assert relative(grads[name], p.grad) < 1e-6, name


@pytest.mark.parametrize("rows", ["chains", "forest"])
def test_micro_batches_only_order_the_sums(played, rows):
    batch, out = batch_from(played), []
    for budget in (1000, 40):
        model = mixture()
        found = backend(model, "rollout", rows=rows, budget=budget).forward_backward(batch, sft_loss)
        out.append((found, gradients(model)))
    (whole, grads), (cut, others) = out
    torch.testing.assert_close(cut.logprobs, whole.logprobs, rtol=0, atol=2e-6)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-7)
    for name, grad in grads.items():
        assert relative(others[name], grad) < 1e-6, name


def test_siblings_share_a_beginning_as_far_as_they_share_its_experts(played):
    batch = batch_from(played)
    passed = {}
    for routes in ("same", "other"):
        told = batch.routes.clone()
        if routes == "other":  # the second sibling's sixth token went elsewhere
            told[int(batch.lengths[0]) + 6, 0] = told[int(batch.lengths[0]) + 6, 0] % EXPERTS + 1
        changed = batch.with_(routes=told)
        each = {
            rows: backend(mixture(), "rollout", rows=rows).forward_backward(changed, sft_loss) for rows in ("chains", "forest")
        }
        torch.testing.assert_close(each["forest"].logprobs, each["chains"].logprobs, rtol=0, atol=2e-6)
        passed[routes] = each["forest"].num_tokens
    assert passed["same"] < batch.num_tokens
    assert passed["other"] - passed["same"] == 13 - 5, "its prompt is its own from that token on, and the last one was before"


def test_shares_of_other_choices_are_counted(played):
    batch = batch_from(played)
    told = backend(mixture(), "rollout").forward_backward(batch, sft_loss).metrics["routing/differs"]
    pairs = (batch.num_tokens - batch.num_samples) * LAYERS
    assert told.count == pairs and 0.1 < told.value < 0.9
    steady = batch_from(play(mixture()))
    assert backend(mixture(), "rollout").forward_backward(steady, sft_loss).metrics["routing/differs"].value == 0
    assert "routing/differs" not in backend(mixture(), "off").forward_backward(batch, sft_loss).metrics


def test_experts_may_come_in_one_row_for_each_token(played):
    batch, trained = batch_from(played), backend(mixture(), "rollout")
    flat = batch.with_(routes=batch.routes.flatten(1)[..., None])
    one, other = (trained.annotate(each, Need.OLD_LOGPROBS).old_logprobs for each in (batch, flat))
    assert torch.equal(one, other)


def test_unknown_experts_are_the_trainer_s_own_choice(played):
    batch = batch_from(played)
    unknown = batch.with_(routes=torch.zeros_like(batch.routes))
    one = backend(mixture(), "rollout").annotate(unknown, Need.OLD_LOGPROBS).old_logprobs
    other = backend(mixture(), "off").annotate(batch, Need.OLD_LOGPROBS).old_logprobs
    assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("rows", ["chains", "forest"])
def test_the_old_pass_s_choice_holds_in_the_update_though_routers_waver(kind, rows):
    batch = batch_from(play(mixture(kind), routes=False))
    for replay, same in (("old", True), ("off", False)):
        model = mixture(kind)
        trained = backend(model, replay, rows=rows)
        unsteady(model)
        annotated = trained.annotate(batch, Need.OLD_LOGPROBS)
        found = trained.forward_backward(annotated, sft_loss)
        ratio = (found.logprobs - annotated.old_logprobs).exp()[batch.loss_mask]
        assert bool((ratio == 1).all()) is same
        assert (annotated.routes is not None) is same
        if same:
            assert found.metrics["routing/differs"].value > 0.1


def test_a_bias_of_the_choice_may_move_between_old_pass_and_update():
    batch, model = batch_from(play(mixture("glm4_moe"), routes=False)), mixture("glm4_moe")
    trained = backend(model, "old")
    annotated = trained.annotate(batch, Need.OLD_LOGPROBS)
    for gate in gates_of(model):
        gate.e_score_correction_bias.copy_(torch.linspace(-1, 1, EXPERTS))
    found = trained.forward_backward(annotated, sft_loss)
    assert torch.equal(found.logprobs, annotated.old_logprobs)
    assert found.metrics["routing/differs"].value > 0.3


def test_reference_and_critic_choose_by_themselves(played):
    batch = batch_from(played)
    frozen = TorchBackend(mixture(), TrainConfig(rows="chains", routing_replay="rollout"), None)
    plainly = TorchBackend(mixture(), TrainConfig(rows="chains"), None)
    one, other = (each.annotate(batch, Need.REF_LOGPROBS) for each in (frozen, plainly))
    assert torch.equal(one.ref_logprobs, other.ref_logprobs) and torch.equal(one.routes, batch.routes)


def test_what_cannot_be_replayed_is_refused_by_name(played):
    with pytest.raises(ValueError, match=r"train.routing_replay: Qwen3ForCausalLM has no experts"):
        backend(policy(), "rollout")
    with pytest.raises(ValueError, match="compile does not go with routing_replay=old"):
        TrainConfig(compile=True, routing_replay="old")
    batch, trained = batch_from(played), backend(mixture(), "rollout")
    with pytest.raises(ValueError, match="the engine runs another model"):
        trained.annotate(batch.with_(routes=batch.routes[:, :2]), Need.OLD_LOGPROBS)
    with pytest.raises(ValueError, match="expert 8, and the model has 8 a layer"):
        trained.annotate(batch.with_(routes=torch.full_like(batch.routes, 9)), Need.OLD_LOGPROBS)


def test_an_update_tells_what_replay_does(played):
    """With and without replay, over the same tokens; and how much nobody reported."""
    batch, trained = batch_from(played), backend(mixture(), "rollout")
    found = replay_metrics(batch, trained)
    assert found["routing/mismatch"].value < 2e-6 and found["routing/mismatch_without"].value > 0.01
    assert found["routing/mismatch"].count == 18, "the first sample has a 32nd of the trained tokens, and more"
    assert found["routing/unknown"].value == 0
    gone = batch.routes.clone()
    gone[5:9, 1] = 0
    share = replay_metrics(batch.with_(routes=gone), trained)["routing/unknown"]
    assert (share.sum, share.count) == (4, (batch.num_tokens - batch.num_samples) * LAYERS)
