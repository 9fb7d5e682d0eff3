"""Real rollouts on a tiny random model: what trains is what the embedded engine sampled, and nothing of a tool's reply ever does."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config

from tests.rollout.scripted import RENDERER, opens, run
from tests.rollout.tiny_engine import STOPS, TURNS
from whet.core.batch import batch_of
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.engine import EmbeddedEngine
from whet.env.base import EnvFactory, Step
from whet.env.calculator import calculator
from whet.env.limits import Limits
from whet.env.rollout import TrajectoryRun
from whet.env.tool_env import ToolEnv
from whet.env.tools import Tool
from whet.model.attention import PackedRow
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.rollout.runner import TrajectoryRunner
from whet.rollout.samples import samples_of_groups
from whet.types import UNSAMPLED, Finish, Message, Origin, Outcome, Rewards, SamplingParams, Task


async def reward(trajectory):
    return Rewards(float(len(trajectory.response) % 2))


class Spy:
    """Looks on what the engine is asked for and hands over."""

    def __init__(self, engine):
        self._engine = engine
        self.sampled = defaultdict(list)
        """(token, log-prob, version) by conversation."""
        self.contexts = {}
        """The last request of each conversation and what it got."""

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def generate(self, request):
        earlier = self.contexts.get(request.conversation, ())
        assert request.tokens[: len(earlier)] == earlier, "a request must extend the one before"
        self.contexts[request.conversation] = request.tokens
        async for chunk in self._engine.generate(request):
            pairs = zip(chunk.tokens, chunk.logprobs, strict=True)
            self.sampled[request.conversation] += [(token, logprob, chunk.version) for token, logprob in pairs]
            self.contexts[request.conversation] += chunk.tokens
            yield chunk


@pytest.fixture(scope="module")
def model():
    size = len(RENDERER.tokenizer)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=size, max_position_embeddings=1024, tie_word_embeddings=True, **shape, **heads)
    return random_causal(config, ModelConfig(path="tiny", device="cpu"), seed=3)


def collect(model, seed, *, deterministic=True, version=0, timeout_s=None):
    async def main():
        with ThreadPoolExecutor(1) as thread:
            config = EmbeddedConfig(cache_tokens=4096, max_batch_tokens=256)
            engine = EmbeddedEngine(model, config, thread, shares_weights=True, deterministic=deterministic)
            if version:
                await engine.update(model.named_weights(), version)
            spy = Spy(engine)
            params = SamplingParams(64, stop_token_ids=STOPS)
            tools = [Tool(calculator)]
            runner = TrajectoryRunner(
                spy, TURNS, EnvFactory(lambda: ToolEnv(tools)), reward, params, Limits(4, 400, 24), timeout_s
            )
            tasks = [Task(f"t/{n}", (Message("user", f"{n}*3?"),), str(n)) for n in range(5)]
            try:
                return await runner.play(tasks, 4, seed), spy
            finally:
                await engine.close()

    return run(main())


@pytest.fixture(scope="module")
def rollout(model):
    return collect(model, 1, version=3)


def test_the_trained_tokens_are_exactly_what_the_engine_sampled(rollout):
    groups, spy = rollout
    samples = samples_of_groups(groups)
    assert len(samples) == 20 and all(sample.valid for sample in samples)
    for sample in samples:
        columns = zip(sample.tokens, sample.logprobs, sample.versions, strict=True)
        trained = [row for row, trains in zip(columns, sample.loss_mask, strict=True) if trains]
        assert trained == spy.sampled[sample.trajectory]
        assert {version for _, _, version in trained} == {3}
        assert sample.tokens == spy.contexts[sample.trajectory]


def test_no_token_of_a_tool_s_reply_trains(rollout):
    groups, _ = rollout
    trajectories = {t.id: t for group in groups for t in group.trajectories}
    assert sum(len(t.turns) for t in trajectories.values()) > 1.5 * len(trajectories)  # conversations do go on
    assert {t.outcome for t in trajectories.values()} == {Outcome.COMPLETED, Outcome.TRUNCATED}
    counts = [t.counts for t in trajectories.values()]
    assert all(sum(c.get(key, 0) for c in counts) > 0 for key in ("tool_calls", "tool_calls_malformed", "tool_errors"))
    replies = 0
    for sample in samples_of_groups(groups):
        whole, turns = RENDERER.decode(sample.tokens), trajectories[sample.trajectory].turns
        replies += whole.count("<tool_response>\n")
        for place, (origin, trains) in enumerate(zip(sample.origin, sample.loss_mask, strict=True)):
            assert trains == (origin is Origin.MODEL)
            assert trains or (sample.logprobs[place], sample.versions[place]) == (0.0, UNSAMPLED)
        contexts = [token for turn in turns for token in turn.context]
        assert contexts == [t for t, trains in zip(sample.tokens, sample.loss_mask, strict=True) if not trains]
        for turn in turns[1:]:
            assert "<tool_response>" in RENDERER.decode(turn.context)
            assert set(turn.context_origin) == {Origin.ENVIRONMENT}
    assert replies > 10


def test_the_log_probs_are_those_of_the_model_at_those_places(rollout, model):
    """Each sample through the model in one pass: a shift by one token, or a lost one, would show."""
    groups, _ = rollout
    batch = batch_of(samples_of_groups(groups))
    attend = PackedRow(batch.lengths.tolist(), torch.device("cpu"))
    with torch.no_grad():
        logits = model.logits(model.hidden(batch.tokens, attend.positions, attend)).double()
    places = batch.loss_mask.nonzero().squeeze(-1)
    expected = torch.log_softmax(logits[places - 1], -1).gather(-1, batch.tokens[places, None]).squeeze(-1)
    assert len(places) > 100
    torch.testing.assert_close(batch.rollout_logprobs[places].double(), expected, atol=1e-5, rtol=0)


def test_the_same_seed_gives_the_same_rollout_and_another_does_not(model, rollout):
    def tokens(groups):
        return [[turn.tokens for turn in t.turns] for group in groups for t in group.trajectories]

    again, _ = collect(model, 1, version=3)
    other, _ = collect(model, 2, version=3)
    assert tokens(again) == tokens(rollout[0])
    assert tokens(other) != tokens(again)


def test_a_rollout_out_of_time_keeps_what_the_engine_had_sampled(model, monkeypatch):
    """The engine is slowed down so that the deadline falls into its work; the aborted turns are whole."""
    step = EngineCore.step

    def slow_step(core):
        time.sleep(0.02)
        return step(core)

    monkeypatch.setattr(EngineCore, "step", slow_step)
    groups, spy = collect(model, 1, deterministic=False, timeout_s=0.3)
    trajectories = [t for group in groups for t in group.trajectories]
    late = [t for t in trajectories if t.outcome is Outcome.TIMEOUT]
    assert "engine" in {t.error.where for t in late if t.error is not None}
    for t in trajectories:
        kept = [row for turn in t.turns for row in zip(turn.tokens, turn.logprobs, turn.versions, strict=True)]
        assert kept == spy.sampled[t.id]
    assert sum(t.num_tokens_sampled for t in late) > 0
    assert not any(sample.valid for sample in samples_of_groups(groups) if sample.trajectory in {t.id for t in late})


class SamePrompt:
    """An environment that rewrites the history to the same prompt after every turn: another try, or a sub-agent."""

    tools = ()

    async def start(self, task):
        self.first = task.prompt
        return task

    async def resume(self, task, turns):
        return await self.start(task)

    async def step(self, reply):
        return Step(history=self.first)

    async def close(self):
        pass


def tries(model, num_tries, begun=None):
    """A trajectory whose every turn sees the same prompt, from its start or from what there is of it."""

    async def main():
        with ThreadPoolExecutor(1) as thread:
            config = EmbeddedConfig(cache_tokens=4096, max_batch_tokens=256)
            engine = EmbeddedEngine(model, config, thread, shares_weights=True, deterministic=True)
            task = Task("t/0", (Message("user", "2*3?"),), "6")
            stops = tuple(range(len(RENDERER.tokenizer) // 3))
            params = SamplingParams(64, stop_token_ids=stops, seed=11)
            run_of = TrajectoryRun("t/0/0", task, engine, TURNS, params, Limits(num_tries, 400, 24), chunk_tokens=1)
            if begun is not None:
                run_of.resume_from(begun)
            try:
                return await run_of.to_end(opens(SamePrompt()))
            finally:
                await engine.close()

    return run(main())


def test_a_turn_that_sees_the_same_prompt_again_draws_anew(model):
    trajectory = tries(model, 12)
    turns = trajectory.turns
    assert len(turns) > 3 and len({turn.context for turn in turns}) == 1
    assert len({turn.tokens for turn in turns}) > len(turns) // 2, "the same draw for ever"
    assert tries(model, 12).turns == turns, "the same seed gives the same bits"
    for cut in [n for n, turn in enumerate(turns) if len(turn.tokens) > 1]:
        half = turns[cut].tokens[: len(turns[cut].tokens) // 2]
        begun = replace(turns[cut], tokens=half, logprobs=turns[cut].logprobs[: len(half)], versions=turns[cut].versions[: len(half)])
        begun = replace(trajectory, turns=(*turns[:cut], replace(begun, finish=Finish.ABORT)))
        assert [turn.tokens for turn in tries(model, 12, begun=begun).turns] == [turn.tokens for turn in turns]
