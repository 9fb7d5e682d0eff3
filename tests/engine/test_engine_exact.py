"""What the engine samples is what the model says: compared with plain transformers, one sequence at a time, without any cache."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.engine.engine_setup import ROUNDED, VOCAB, Reply, engine_of, plain, plain_logprobs, reply_to, serve, serve_all, tiny
from whet.types import Finish, Request, SamplingParams

KINDS = ("qwen3", "qwen2", "llama")
TOLERANCE = {"float64": 1e-8, "float32": 1e-4}


def some_requests(temperature: float, **options: float) -> list[Request]:
    """Prompts of 1 to 40 tokens, each asked three times."""
    rng = random.Random(7)
    out: list[Request] = []
    for i in range(8):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 8, 9, 17, 40))))
        for k in range(3):
            sampling = SamplingParams(rng.randrange(1, 14), temperature, seed=100 * i + k, **options)
            out.append(Request(f"{i}/{k}", prompt, sampling, f"{i}/{k}"))
    return out


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_plain_transformers(kind, dtype):
    engine = engine_of(tiny(kind, dtype), cache_tokens=96, max_batch_tokens=24)
    requests = some_requests(0.0)
    replies = serve_all(engine, requests)
    assert engine.core.scheduler.num_preempted > 0, "the pool was meant to be too small"
    for request in requests:
        reply = replies[request.id]
        assert len(reply.tokens) == request.sampling.max_tokens and reply.finish is Finish.LENGTH
        assert set(reply.logprobs) == {0.0}
        expected = plain_logprobs(plain(kind, dtype), request.tokens + reply.tokens).argmax(-1)
        assert list(reply.tokens) == expected[len(request.tokens) - 1 : -1].tolist()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_plain_transformers(kind, dtype):
    engine = engine_of(tiny(kind, dtype), cache_tokens=96, max_batch_tokens=24)
    requests = some_requests(1.0)
    replies = serve_all(engine, requests)
    assert engine.core.scheduler.num_preempted > 0
    for request in requests:
        reply = replies[request.id]
        table = plain_logprobs(plain(kind, dtype), request.tokens + reply.tokens)[len(request.tokens) - 1 : -1]
        expected = table.gather(-1, torch.tensor(reply.tokens)[:, None]).squeeze(-1).tolist()
        assert reply.logprobs == pytest.approx(expected, rel=ROUNDED, abs=TOLERANCE[dtype])


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}, {"top_k": 12}, {"top_k": 30, "top_p": 0.9}])
def test_what_a_request_draws_does_not_depend_on_its_company(options):
    requests = some_requests(0.7, **options)
    together = serve_all(engine_of(tiny(), cache_tokens=96, max_batch_tokens=24), requests)
    roomy = serve_all(engine_of(tiny()), requests[::-1])
    for request in requests[::3] + requests[1::5]:
        alone = serve_all(engine_of(tiny()), [request])[request.id]
        for reply in (together[request.id], roomy[request.id]):
            assert reply.tokens == alone.tokens
            assert reply.logprobs == pytest.approx(alone.logprobs, abs=1e-9)


def test_nucleus_logprobs_in_a_mixed_batch_are_of_the_restricted_distribution():
    warm = Request("warm", (5, 6, 7), SamplingParams(10, 0.7, top_p=0.6, seed=3))
    others = [Request("cold", (5, 6, 7), SamplingParams(10, 0.0)), Request("open", (5, 6, 7), SamplingParams(10, 1.0))]
    reply = serve_all(engine_of(tiny()), [warm, *others])["warm"]
    table = plain_logprobs(plain(), warm.tokens + reply.tokens)[len(warm.tokens) - 1 : -1]
    for row, token, logprob in zip(table, reply.tokens, reply.logprobs, strict=True):
        chance = torch.softmax(row / 0.7, -1)
        likely = chance.argsort(descending=True).tolist()
        kept: list[int] = []
        while sum(float(chance[t]) for t in kept) < 0.6:
            kept.append(likely[len(kept)])
        assert token in kept
        assert logprob == pytest.approx(math.log(chance[token] / sum(chance[t] for t in kept)), rel=ROUNDED, abs=1e-8)


@pytest.mark.parametrize("length", [1, 2, 3, 21, 96])
def test_score_is_that_of_plain_transformers(length):
    engine = engine_of(tiny(), cache_tokens=96, max_batch_tokens=16)
    tokens = tuple((5 * i + 1) % VOCAB for i in range(length))

    async def play() -> tuple[float, ...]:
        return (await engine.score(tokens, 0.8)).logprobs

    table = torch.log_softmax(plain_logprobs(plain(), tokens) / 0.8, -1)
    expected = [float(table[i, t]) for i, t in enumerate(tokens[1:])]
    assert serve(engine, play) == pytest.approx(expected, abs=1e-9)


def test_a_conversation_goes_on_from_its_own_cache():
    engine = engine_of(tiny())
    first = Request("a/0", tuple(range(30)), SamplingParams(10, 1.0, seed=1), "a")
    extra = (3, 1, 4, 1, 5)

    async def play() -> tuple[Reply, Reply, int]:
        engine.open("a")
        one = await reply_to(engine, first)
        before = engine.core.num_computed
        assert before == 30 + 10 - 1, "the prompt, and every sampled token but the last, is computed once"
        history = first.tokens + one.tokens + extra
        two = await reply_to(engine, Request("a/1", history, SamplingParams(4, 1.0, seed=1), "a"))
        computed = engine.core.num_computed - before
        engine.release("a")
        return one, two, computed

    one, two, computed = serve(engine, play)
    assert computed == 1 + len(extra) + 3  # the last sampled token, what came after it, and the new reply but its last
    history = first.tokens + one.tokens + extra
    alone = serve_all(engine_of(tiny()), [Request("x", history, SamplingParams(4, 1.0, seed=1))])["x"]
    assert two.tokens == alone.tokens
    assert two.logprobs == pytest.approx(alone.logprobs, abs=1e-9)


@pytest.mark.parametrize("cut", [0, 1, 17, 30])
def test_a_rewritten_history_is_computed_again_from_where_it_differs(cut):
    engine = engine_of(tiny())
    prompt = tuple(range(30))
    rewritten = prompt[:cut] + tuple(60 + i for i in range(31 - cut))

    async def play() -> tuple[Reply, int]:
        engine.open("a")
        await reply_to(engine, Request("a/0", prompt, SamplingParams(6, 1.0), "a"))
        before = engine.core.num_computed
        reply = await reply_to(engine, Request("a/1", rewritten, SamplingParams(1, 1.0), "a"))
        return reply, engine.core.num_computed - before

    reply, computed = serve(engine, play)
    assert computed == 31 - cut
    assert reply == serve_all(engine_of(tiny()), [Request("a/1", rewritten, SamplingParams(1, 1.0))])["a/1"]


@pytest.mark.parametrize("length", [9, 12, 13])
@pytest.mark.parametrize("max_batch_tokens", [5, 256])
def test_siblings_share_one_prefill_of_their_prompt(length, max_batch_tokens):
    engine = engine_of(tiny(), max_batch_tokens=max_batch_tokens, max_running=8)
    prompt = tuple(range(length))
    requests = [Request(str(k), prompt, SamplingParams(6, 1.0, seed=k), str(k)) for k in range(8)]
    replies = serve_all(engine, requests)
    # Once the prompt but for its last token; then, for each sibling, that token and what it samples but for its last.
    assert engine.core.num_computed == length - 1 + 8 * (1 + 5)
    for request in requests:
        alone = serve_all(engine_of(tiny()), [request])[request.id]
        assert replies[request.id].tokens == alone.tokens
        assert replies[request.id].logprobs == pytest.approx(alone.logprobs, abs=1e-9)
    assert len({reply.tokens for reply in replies.values()}) > 4
