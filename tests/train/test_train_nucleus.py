"""What was sampled with top-p or top-k trains over the tokens that it was drawn from: from the engine's draw to the gradient."""

from __future__ import annotations

import asyncio
import json
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.train.tiny_policy import VOCAB, gradients, plain, policy, relative
from whet.algo.base import Need
from whet.algo.sft import sft_loss
from whet.core.batch import batch_of
from whet.core.weights import REDUCERS
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.engine import EmbeddedEngine
from whet.rollout.samples import samples_of
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.types import Finish, Message, Origin, Outcome, Request, Rewards, SamplingParams, Task, Trajectory, Turn
from whet.types.json_codec import trajectory_from_json, trajectory_to_json

PROMPT = tuple(range(3, 23))
CUTS = {"top_p": {"top_p": 0.9}, "top_k": {"top_k": 5}, "both": {"top_p": 0.6, "top_k": 20, "temperature": 0.7}}


def play(model, num_siblings=5, **options):
    """Siblings of one prompt, each with a second turn, as a stopped rollout gives them back."""
    params = {"max_tokens": 12, "nucleus": True, **options}

    async def main():
        with ThreadPoolExecutor(1) as thread:
            engine = EmbeddedEngine(model, EmbeddedConfig(cache_tokens=2048), thread, shares_weights=True, deterministic=False)
            try:
                return await asyncio.gather(*(sibling(engine, i) for i in range(num_siblings)))
            finally:
                await engine.close()

    async def sibling(engine, i):
        turns, history = [], ()
        for place, context in enumerate((PROMPT, (50, 51))):
            history += context
            request = Request(f"{i}/{place}", history, SamplingParams(**params, seed=7 * i + place), chunk_tokens=5)
            chunks = [chunk async for chunk in engine.generate(request)]
            tokens, logprobs, kept = (
                tuple(x for chunk in chunks for x in getattr(chunk, name)) for name in ("tokens", "logprobs", "nucleus")
            )
            origin = (Origin.ENVIRONMENT if place else Origin.PROMPT,) * len(context)
            kept = kept if params["nucleus"] else None
            turns.append(
                Turn(context, origin, tokens, logprobs, (0,) * len(tokens), Message("assistant", ""), Finish.LENGTH, nucleus=kept)
            )
            history += tokens
        heat = params.get("temperature", 1.0)
        return Trajectory(f"t/{i}", Task("t", "q"), tuple(turns), Outcome.COMPLETED, Rewards(float(i)), temperature=heat)

    played = list(asyncio.run(main()))
    again = [trajectory_from_json(json.loads(json.dumps(trajectory_to_json(t)))) for t in played]
    assert again == played
    return again


def batch_from(trajectories):
    batch = batch_of([sample for trajectory in trajectories for sample in samples_of(trajectory)])
    return batch.with_(weights=REDUCERS["sample_mean"](batch))


def backend(model, rows, budget=1000, steps=None):
    return TorchBackend(model, TrainConfig(rows=rows, max_tokens_per_device=budget, logprob_chunk_tokens=7), steps)


@pytest.mark.parametrize("cut", CUTS)
def test_the_recorded_ids_are_the_definition_s_and_hold_what_was_drawn(cut):
    model, options = policy("float64", seed=5), CUTS[cut]
    twin, sizes = plain(model), set()
    for trajectory in play(model, 2, **options):
        (sample,) = samples_of(trajectory)
        chances = (twin(input_ids=torch.tensor([sample.tokens])).logits[0] / sample.temperature).softmax(-1).detach()
        for t, ids in enumerate(sample.nucleus):
            if sample.origin[t] is not Origin.MODEL:
                assert ids == b""
                continue
            mass, order = chances[t - 1].sort(descending=True)
            mass, order = mass[: options.get("top_k", VOCAB)], order[: options.get("top_k", VOCAB)]
            mass = mass / mass.sum()
            kept = order[(mass.cumsum(-1) - mass) < options.get("top_p", 2.0)]
            assert sorted(kept.tolist()) == list(array("i", ids)) and sample.tokens[t] in kept
            sizes.add(len(kept))
    assert max(sizes) < VOCAB and (len(sizes) > 3 or sizes == {5})


@pytest.mark.parametrize("rows", ["chains", "forest"])
@pytest.mark.parametrize("cut", CUTS)
def test_the_trainer_s_log_probs_are_the_engine_s(cut, rows):
    model = policy("float32", seed=5)
    batch = batch_from(play(model, **CUTS[cut]))
    found = backend(model, rows, budget=70).annotate(batch, Need.OLD_LOGPROBS).old_logprobs
    assert batch.loss_mask.sum() == 5 * 24
    assert float((found - batch.rollout_logprobs).abs().max()) < 1e-5
    whole = backend(model, rows).annotate(batch.with_(nucleus_sizes=None, nucleus_ids=None), Need.OLD_LOGPROBS).old_logprobs
    assert float((whole - batch.rollout_logprobs).abs().max()) > 0.05, "over the whole vocabulary they would not be"


@pytest.mark.parametrize("rows", ["chains", "forest"])
@pytest.mark.parametrize("cut", CUTS)
def test_loss_and_gradient_are_the_plain_model_s_over_those_tokens(cut, rows):
    model = policy("float64", seed=5)
    trajectories = play(model, **CUTS[cut])
    trajectories.append(trajectories[0])  # shares every action
    batch = batch_from(trajectories)
    policy_backend = backend(model, rows, budget=90, steps=1)
    squared = policy_backend.annotate(batch, Need.SQUARED_PROBS).squared_probs
    found = policy_backend.forward_backward(batch, sft_loss)
    grads = gradients(model)
    twin, loss, expected, squares = plain(model), 0.0, [], []
    place = 0
    for sample in (s for t in trajectories for s in samples_of(t)):
        logits = twin(input_ids=torch.tensor([sample.tokens])).logits[0] / sample.temperature
        for t, ids in enumerate(sample.nucleus):
            if sample.loss_mask[t]:
                kept = list(array("i", ids))
                logprobs = logits[t - 1, kept].log_softmax(-1)
                expected.append(logprobs[kept.index(sample.tokens[t])])
                squares.append(logprobs.exp().square().sum())
                loss = loss - batch.weights[place].double() * expected[-1]
            place += 1
    loss.backward()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-6)
    for column, values in [(found.logprobs, expected), (squared, squares)]:
        torch.testing.assert_close(column[batch.loss_mask].double(), torch.stack(values).detach(), rtol=1e-5, atol=1e-6)
    for name, p in twin.named_parameters():
        assert relative(grads[name], p.grad) < 1e-6, name


def test_nobody_asked_or_nothing_left_out_is_the_whole_vocabulary():
    model = policy("float32", seed=5)
    asked, unasked = batch_from(play(model)), batch_from(play(model, nucleus=False, top_k=5))
    assert asked.nucleus_sizes is None or not asked.nucleus_sizes.any()
    assert unasked.nucleus_sizes is None
    found = backend(model, "chains").annotate(asked, Need.OLD_LOGPROBS).old_logprobs
    assert float((found - asked.rollout_logprobs).abs().max()) < 1e-5
