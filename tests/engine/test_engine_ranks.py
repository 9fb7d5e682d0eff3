"""An engine whose layers are cut over processes says what one process says, proves its weights part by part, and names a rank that dies."""

import asyncio
import itertools
import os
import signal
import subprocess
from dataclasses import replace
from multiprocessing.connection import Client, Listener

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3MoeConfig

from tests.engine.engine_setup import CONFIGS, DEADLINE_S, SHAPE, engine_of, reply_to
from tests.parallel.ranks import on_ranks
from whet.engine.base import EngineFailed, EngineRefused
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.tensor_parallel import OtherRank, RankZero, check_split, keep_part
from whet.engine.pool.config import PoolConfig
from whet.engine.workers.copies import EngineCopies
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.digest import differences, digests_of
from whet.transport.apply import copy_weights
from whet.transport.base import SharedTicket
from whet.transport.receive import Receiver
from whet.types import Finish, Request, SamplingParams
from whet.types.routes import Routes

pytestmark = pytest.mark.long

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
KINDS = {
    "untied": CONFIGS["qwen3"],
    "tied": lambda: Qwen3Config(head_dim=16, tie_word_embeddings=True, **SHAPE),
    "llama": CONFIGS["llama"],
    "moe": lambda: Qwen3MoeConfig(head_dim=16, **MOE, **SHAPE),
}
SIZES = {"cache_tokens": 160, "block_size": 4, "max_running": 6, "max_batch_tokens": 48}
TIGHT = SIZES | {"cache_tokens": 72}
"""Sequences are preempted."""
VERSIONS = itertools.count(1)


def model(kind="untied", dtype="float64", seed=0):
    return random_causal(KINDS[kind](), ModelConfig(path="", dtype=dtype, device="cpu"), seed=seed)


def requests(num=9, max_tokens=14):
    """Of several lengths, some greedy, some with options; too many for the cache at once."""
    options = [{}, {"temperature": 0.0}, {"top_p": 0.8}, {"repetition_penalty": 1.3, "raw_logprobs": True, "top_logprobs": 2}]
    return [
        Request(
            f"r{i}",
            tuple((5 * i + k) % 97 for k in range(3 + 7 * (i % 4))),
            SamplingParams(**({"max_tokens": max_tokens, "temperature": 1.0, "seed": i} | options[i % 4])),
        )
        for i in range(num)
    ]


async def play(engine, asked):
    replies = await asyncio.wait_for(asyncio.gather(*(reply_to(engine, request) for request in asked)), DEADLINE_S)
    return replies, await engine.score(tuple(range(1, 40)), 0.9, 2)


def alone(held, asked):
    async def whole():
        engine = engine_of(held, **SIZES)
        try:
            return await play(engine, asked)
        finally:
            await engine.close()

    return asyncio.run(whole())


def assert_same(found, expected, tolerance):
    (replies, score), (theirs, scored) = found, expected
    for one, other in zip(replies, theirs, strict=True):
        assert one.tokens == other.tokens and one.finish == other.finish
        assert one.logprobs == pytest.approx(other.logprobs, abs=tolerance)
        raw, own = ([x for chunk in each.chunks for x in chunk.raw_logprobs] for each in (one, other))
        assert raw == pytest.approx(own, abs=tolerance)
    assert score.logprobs == pytest.approx(scored.logprobs, abs=tolerance)
    assert [[token for token, _ in top] for top in score.top_logprobs] == [[token for token, _ in top] for top in scored.top_logprobs]


def engine_over(held, copies=1, ranks=2, **more):
    sizes = EmbeddedConfig(**SIZES, copies=copies, tensor_parallel=ranks)
    return EngineCopies(held, sizes, deterministic=False, **more)


def met(path):
    """The first rank's pipe to the second, or the other way round."""
    if dist.get_rank() == 0:
        with Listener(str(path)) as listener:
            dist.barrier()
            return RankZero([listener.accept()])
    dist.barrier()
    return OtherRank(Client(str(path)))


def lead(path, kind, dtype, new, spoil):
    """What two ranks say before and after an update, and which digests of the first are wrong; the second takes over a wrong `spoil`."""
    held = model(kind, dtype)
    keep_part(held, "cpu")
    first = dist.get_rank() == 0
    staged = model(kind, dtype, seed=new)
    if not first and spoil:
        with torch.no_grad():
            dict(staged.named_weights())[spoil].view(-1)[-1] += 1e-3
    ranks = met(path)
    core = EngineCore(held, EmbeddedConfig(**TIGHT), ranks=ranks)
    if not first:
        ranks.serve_calls(core, Receiver("rank", staged, dict, dict))
        return None
    out = [said(core)]
    copy_weights(dict(core.model.named_weights()), list(staged.named_weights()))
    core.ranks.broadcast("take", SharedTicket(1))
    core.begin_version(1)
    digests = core.ranks.digests(core.model)
    out.append(said(core))
    wrong = differences(digests_of(staged.named_state()), digests)
    ranks._pipes[0].close()
    return out, wrong, core.scheduler.num_preempted


def said(core):
    sequences = [core.add(request) for request in requests()]
    while core.has_work:
        for item in core.step():
            if item.finish is not None:
                core.finish(item.sequence)
    return [(s.tokens, s.logprobs) for s in sequences], core.score(tuple(range(1, 40)), 0.9, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-8), ("float32", 1e-4)])
def test_two_ranks_say_what_one_process_says_before_and_after_new_weights(tmp_path, kind, dtype, tolerance):
    found, _ = on_ranks(2, lead, tmp_path / "s", kind, dtype, 1, None)
    told, wrong, num_preempted = found
    assert wrong == [] and num_preempted > 0
    for seed, (replies, score) in zip((0, 1), told, strict=True):
        theirs, scored = said(EngineCore(model(kind, dtype, seed), EmbeddedConfig(**TIGHT)))
        for (tokens, logprobs), (own, expected) in zip(replies, theirs, strict=True):
            assert tokens == own and logprobs == pytest.approx(expected, abs=tolerance)
        assert score.logprobs == pytest.approx(scored.logprobs, abs=tolerance)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.o_proj.weight", "lm_head.weight", "model.norm.weight"])
def test_one_wrong_number_in_another_ranks_part_is_found(tmp_path, name):
    """Of a matrix that is cut by rows or columns, and of one that every rank has whole."""
    (_, wrong, _), _ = on_ranks(2, lead, tmp_path / "s", "untied", "float64", 1, name)
    assert wrong == [name]


def test_parts_are_in_memory_of_their_own():
    """New weights are put where others may read them before any engine has taken them over."""
    assert on_ranks(2, parts_stay) == [True, True]


def parts_stay():
    held = model()
    before = {name: tensor.data_ptr() for name, tensor in held.named_state()}
    keep_part(held, "cpu")
    local = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in held.named_state()}  # type: ignore[attr-defined]
    return all(tensor.data_ptr() != before[name] for name, tensor in local.items())


@pytest.fixture(scope="module")
def engine():
    """One copy of two ranks."""
    made = engine_over(model())
    yield made
    made.end()


@pytest.mark.slow
def test_copies_may_be_of_several_ranks_each():
    two = engine_over(model(), copies=2)
    try:
        assert len({link.process.child.pid for found in two.members for link in found._links}) == 4
        assert_the_same_before_and_after_new_weights(two)
    finally:
        two.end()


def test_ranks_serve_prove_and_take_over_weights(engine):
    asyncio.run(engine.update(list(model().named_weights()), next(VERSIONS)))
    assert_the_same_before_and_after_new_weights(engine)


def assert_the_same_before_and_after_new_weights(engine):
    asked = requests(12)
    assert_same(asyncio.run(play(engine, asked)), alone(model(), asked), 1e-8)
    new, before, version = model(seed=1), engine.version, next(VERSIONS)

    async def renew():
        streamed = asyncio.create_task(reply_to(engine, Request("long", (3, 4), SamplingParams(60, 1.0, seed=5), chunk_tokens=4)))
        await asyncio.sleep(0.05)
        receipt = await engine.update(list(new.named_weights()), version)
        return receipt, await streamed

    receipt, reply = asyncio.run(renew())
    assert receipt.num_stale_tokens == 0 and differences(digests_of(new.named_state()), receipt.resident) == []
    assert len(reply.tokens) == 60 and set(reply.versions) <= {before, version}
    assert_same(asyncio.run(play(engine, asked)), alone(new, asked), 1e-8)


def test_refusals_and_aborts_leave_the_ranks_in_step(engine):
    async def mixed():
        with pytest.raises(EngineRefused):
            await reply_to(engine, Request("odd", (5000,), SamplingParams(3)))
        running = asyncio.create_task(reply_to(engine, Request("cut", (1, 2), SamplingParams(100, 1.0), chunk_tokens=1)))
        await asyncio.sleep(0.1)
        await engine.abort("cut")
        aborted = await running
        await engine.flush()
        return aborted, await play(engine, requests(6))

    aborted, after = asyncio.run(mixed())
    assert aborted.finish in (Finish.ABORT, Finish.LENGTH)
    assert [len(reply.tokens) for reply in after[0]] == [14] * 6


def test_numbers_that_are_not_finite_end_requests_and_not_the_ranks(engine):
    broken = model()
    with torch.no_grad():
        broken.hf.get_output_embeddings().weight.fill_(torch.nan)

    async def both():
        await engine.update(list(broken.named_weights()), next(VERSIONS))
        with pytest.raises(EngineFailed, match="not finite"):
            await reply_to(engine, requests(1)[0])
        await engine.update(list(model().named_weights()), next(VERSIONS))
        return await play(engine, requests(4))

    assert_same(asyncio.run(both()), alone(model(), requests(4)), 1e-8)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_requests_with_its_name(rank):
    engine = engine_over(model(), pool=PoolConfig(restarts=0))
    children = [link.process.child for link in engine.members[0]._links]
    try:

        async def killed():
            running = asyncio.create_task(reply_to(engine, Request("r", (1, 2), SamplingParams(140, 1.0), chunk_tokens=1)))
            await asyncio.sleep(0.2)
            os.kill(children[rank].pid, signal.SIGKILL)
            with pytest.raises(EngineFailed, match=rf"engine copy 0, rank {rank} died \(killed by signal 9\)"):
                await running
                await reply_to(engine, Request("next", (1, 2), SamplingParams(140, 1.0)))

        asyncio.run(asyncio.wait_for(killed(), DEADLINE_S))
        with pytest.raises(EngineFailed, match=f"rank {rank} died"):
            asyncio.run(reply_to(engine, Request("later", (1, 2), SamplingParams(3))))
    finally:
        engine.end()
    assert all(child.poll() is not None for child in children)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the second rank would start")
def test_a_rank_that_does_not_start_is_named_and_leaves_no_process(monkeypatch):
    started, popen = [], subprocess.Popen

    def noted(*arguments, **options):
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    sizes = EmbeddedConfig(**SIZES, tensor_parallel=2, copy_devices=["cpu", "cuda:0"])
    with pytest.raises(EngineFailed, match=r"engine copy 0, rank 1 did not start \(exit status 1\)"):
        EngineCopies(model(), sizes, deterministic=False)
    assert len(started) == 2 and all(child.poll() is not None for child in started)


def test_what_does_not_divide_is_refused_by_name():
    with pytest.raises(ValueError, match=r"tensor_parallel is 4, but Qwen3ForCausalLM has 4 heads and 2 of keys and values, which 4 ranks"):
        engine_over(model(), ranks=4)
    held = model()
    held.config.base_model_tp_plan = None
    with pytest.raises(ValueError, match="transformers has no plan to cut Qwen3ForCausalLM by; set it to 1"):
        check_split(held, 2)
    with pytest.raises(ValueError, match="copy_devices names 1 devices for 1 copies of 2 processes"):
        EmbeddedConfig(tensor_parallel=2, copy_devices=["cpu"])


@pytest.mark.parametrize(("copies", "ranks"), [(1, 2), (2, 1)])
def test_engines_in_processes_of_their_own_tell_the_experts_that_one_process_tells(copies, ranks):
    held = model("moe")
    asked = [replace(request, sampling=replace(request.sampling, routes=True)) for request in requests(4)]
    engine = engine_over(held, copies, ranks)
    try:
        found = asyncio.run(play(engine, asked))
    finally:
        engine.end()
    expected = alone(held, asked)
    assert_same(found, expected, 1e-6)
    for request, one, other in zip(asked, found[0], expected[0], strict=True):
        told, theirs = (Routes.join([chunk.routes for chunk in each.chunks]).numpy() for each in (one, other))
        assert len(told) == len(request.tokens) + len(one.tokens) and (told[1:] > 0).all()
        assert np.array_equal(np.sort(told), np.sort(theirs))
