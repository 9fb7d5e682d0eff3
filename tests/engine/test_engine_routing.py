"""Chosen experts come back with a reply: those that each token was computed with, whatever the cache, chunks and preemption did."""

from __future__ import annotations

import asyncio
import base64
import io
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.engine.engine_setup import engine_of, reply_to, serve, tiny
from tests.train.tiny_mixture import LAYERS, TOP_K, VOCAB, mixture
from whet.engine.base import EngineFailed, EngineRefused
from whet.engine.pool.reply import PooledReply
from whet.engine.servers.reply import ServedReply
from whet.engine.sglang.wire import ReplyStream
from whet.engine.sglang.wire import body_of as sglang_body
from whet.engine.vllm.wire import body_of as vllm_body
from whet.engine.vllm.wire import sampled_of
from whet.env.sampling import Reply
from whet.model.attention import PackedRow
from whet.model.routing import Routers
from whet.types import Chunk, Finish, Request, SamplingParams
from whet.types.columns import Floats, Ints
from whet.types.routes import Routes


@torch.no_grad()
def chosen(model, tokens) -> np.ndarray:
    """What each token's predecessor chooses in a pass over the whole: numbers plus 1, 0 for the first. [T, L, K]"""
    row = PackedRow([len(tokens)], model.device)
    with Routers(model.hf).watched() as seen:
        model.hidden(torch.tensor(tokens), row.positions, row)
    own = seen.routes().roll(1, 0)
    own[0] = 0
    return own.numpy()


def sorted_experts(routes) -> np.ndarray:
    return np.sort(routes, axis=-1)


def asked(name="r", tokens=(5, 6, 7), num=8, first=0, **options):
    return Request(name, tokens, SamplingParams(num, routes=True, **options), routes_from=first)


def requests():
    """Siblings, and prompts that begin alike."""
    rng = random.Random(5)
    system = tuple(rng.randrange(VOCAB) for _ in range(11))
    prompts = [(7,), system, *(system + tuple(rng.randrange(VOCAB) for _ in range(n)) for n in (1, 6, 19))]
    return [asked(f"{i}/{k}", p, rng.randrange(3, 12), seed=k) for i, p in enumerate(prompts) for k in range(2)]


@pytest.fixture(scope="module")
def model():
    """Float32 in place of float64, whose rounding is far below the distances between experts, but without ties."""
    made = mixture("qwen3_moe", "float64")
    with torch.no_grad():
        for block in (module for module in made.hf.modules() if hasattr(module, "experts")):
            block.gate.weight.copy_(torch.randn(block.gate.weight.shape, generator=torch.Generator().manual_seed(3)))
    return made


def test_the_experts_are_those_of_a_pass_over_the_whole(model):
    engine = engine_of(model, cache_tokens=72, max_batch_tokens=20)

    async def play():
        asks = [replace(request, chunk_tokens=3 if i % 2 else 0) for i, request in enumerate(requests())]
        before = await reply_to(engine, replace(asks[3], id="unasked", sampling=replace(asks[3].sampling, routes=False)))
        assert all(not chunk.routes for chunk in before.chunks)
        return asks, [await reply_to(engine, asks[0]), *await asyncio.gather(*(reply_to(engine, each) for each in asks[1:]))]

    asks, replies = serve(engine, play)
    assert engine.core.scheduler.num_preempted > 0, "the pool was meant to be too small"
    for request, reply in zip(asks, replies, strict=True):
        found = Routes.join([chunk.routes for chunk in reply.chunks])
        tokens = [*request.tokens, *reply.tokens]
        assert len(found) == len(tokens) and (found.layers, found.top_k, found.itemsize) == (LAYERS, TOP_K, 1)
        assert np.array_equal(sorted_experts(found.numpy()), sorted_experts(chosen(model, tokens)))


def test_a_later_turn_tells_only_what_is_new(model):
    engine = engine_of(model)

    async def play():
        first = await reply_to(engine, asked())
        tokens = (5, 6, 7, *first.tokens, 20, 21)
        return tokens, await reply_to(engine, asked("second", tokens, first=3 + len(first.tokens)))

    tokens, second = serve(engine, play)
    found = Routes.join([chunk.routes for chunk in second.chunks]).numpy()
    assert np.array_equal(sorted_experts(found), sorted_experts(chosen(model, [*tokens, *second.tokens])[len(tokens) - 2 :]))


def test_an_aborted_reply_has_the_experts_of_what_it_has(model):
    engine = engine_of(model)

    async def play():
        request = replace(asked(num=100), chunk_tokens=2)
        chunks = []
        async for chunk in engine.generate(request):
            chunks.append(chunk)
            if len(chunks) == 2:
                await engine.abort(request.id)
        return chunks

    chunks = serve(engine, play)
    tokens = [5, 6, 7, *(token for chunk in chunks for token in chunk.tokens)]
    assert chunks[-1].finish is Finish.ABORT and len(tokens) < 100
    found = Routes.join([chunk.routes for chunk in chunks]).numpy()
    assert np.array_equal(sorted_experts(found), sorted_experts(chosen(model, tokens)))


def test_models_and_engines_without_experts_refuse(model):
    async def play(engine):
        return await reply_to(engine, asked())

    with pytest.raises(EngineRefused, match="request r: a request for experts: Qwen3ForCausalLM has no experts"):
        engine = engine_of(tiny())
        serve(engine, lambda: play(engine))
    with pytest.raises(EngineRefused, match="static_decode the engine does not tell experts"):
        other = engine_of(model, static_decode=True)
        serve(other, lambda: play(other))


def test_a_reply_without_the_experts_that_were_asked_for_is_an_error():
    reply = Reply(num_context=3)
    reply.take(Chunk(Ints([1, 2]), Floats([0, 0]), 0, routes=Routes(bytes(5 * 6), 3, 2)), asked())
    assert reply.routes_from(3 + 2) == 5
    with pytest.raises(EngineFailed, match=r"the experts of 1 tokens were asked for .*, and those of 0 came"):
        reply.take(Chunk(Ints([1]), Floats([0]), 0), asked())


def test_a_reply_goes_on_elsewhere_with_the_experts_of_what_is_left():
    pooled = PooledReply(asked(first=1))
    assert pooled.rest.routes_from == 1
    list(pooled.take(Chunk(Ints([1, 2]), Floats([0, 0]), 0, routes=Routes(bytes(4 * 6), 3, 2))))
    assert pooled.rest.routes_from == 5 and len(pooled.rest.tokens) == 5


def npy(rows: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, rows)
    return base64.b64encode(buffer.getvalue()).decode()


def vllm_event(tokens, finish=None, routed=None):
    content = [{"token_id": token, "logprob": -1.0, "rank": 1, "top_logprobs": []} for token in tokens]
    choice = {"index": 0, "token_ids": list(tokens), "logprobs": {"content": content}, "finish_reason": finish}
    return {"choices": [choice if routed is None else {**choice, "routed_experts": routed}]}


@pytest.mark.parametrize("first", [0, 1, 3])
def test_experts_of_vllm_are_those_of_predecessors(first):
    request = asked(first=first)
    start = max(first - 1, 0)
    assert vllm_body(request, "x", "m", "s")["sampling_params"]["routed_experts_prompt_start"] == start
    rows = np.arange(6 * 4 * 2).reshape(6, 4, 2).astype(np.uint8)  # of the tokens 0 to 5 of three and four
    assert sampled_of(vllm_event([9, 8]), request, 0).routes is None
    found = sampled_of(vllm_event([7, 6], "length", npy(rows[start:])), request, 2).routes
    expected = np.concatenate([np.zeros((1, 4, 2)), rows + 1])[first:]
    assert np.array_equal(found.numpy(), expected) and found.itemsize == 1
    wide = sampled_of(vllm_event([7, 6], "length", npy(rows[start:].astype(np.int16) + 300)), request, 2).routes
    assert np.array_equal(wide.numpy()[-6:], expected[-6:] + 300) and wide.itemsize == 2


def test_vllm_s_answers_without_the_experts_are_errors():
    with pytest.raises(EngineFailed, match="start it with --enable-return-routed-experts"):
        sampled_of(vllm_event([7], "stop"), asked())
    with pytest.raises(EngineFailed, match=r"the experts that came have the shape \(2, 4, 2\), and those of 3 tokens were asked for"):
        sampled_of(vllm_event([7], "stop", npy(np.zeros((2, 4, 2), np.uint8))), asked())
    with pytest.raises(EngineFailed, match="routed_experts are not as vLLM's"):
        sampled_of(vllm_event([7], "stop", "xxxx"), asked())
    assert sampled_of(vllm_event([7], "abort"), asked()).routes is None
    with pytest.raises(EngineRefused, match="cuts this one at a stop text"):
        vllm_body(asked(stop=("x",)), "x", "m", "s")


def sglang_event(total, finish=None, routed=None):
    entries = [[-1.0, token, None] for token in range(total)]
    meta = {"completion_tokens": total, "output_token_logprobs": entries, "weight_version": "1", "finish_reason": finish}
    return {"output_ids": list(range(total)), "meta_info": meta if routed is None else {**meta, "routed_experts": routed}}


def test_experts_of_sglang_come_without_their_shape():
    request = asked(first=2)
    body = sglang_body(request, "x")
    assert body["return_routed_experts"] is True and body["routed_experts_start_len"] == 1
    stream, rows = ReplyStream(request), np.arange(4 * 4 * 2, dtype=np.int32).reshape(4, 4, 2)
    assert stream.sampled(sglang_event(1)).routes is None
    found = stream.sampled(sglang_event(3, {"type": "length"}, base64.b64encode(rows.tobytes()).decode())).routes
    assert np.array_equal(found.numpy().reshape(4, 4, 2), rows + 1)
    with pytest.raises(EngineFailed, match="none came: start the server with --enable-return-routed-experts"):
        ReplyStream(request).sampled(sglang_event(1, {"type": "length"}))


def test_an_attempt_that_was_cut_off_without_experts_is_sampled_again():
    reply = ServedReply(asked(), str)
    reply.take(sampled_of(vllm_event([7, 8]), asked()))
    assert reply.lacks_routes
    reply.let_go()
    assert reply.num_dropped == 2 and reply.rest.routes_from == 0 and len(reply.rest.tokens) == 3
    rows = npy(np.zeros((3, 4, 2), np.uint8))
    reply.take(sampled_of(vllm_event([7], "abort", rows), asked()))
    assert not reply.lacks_routes
    assert len(reply.chunk(0, None).routes) == 4 and reply.rest.routes_from == 4
