"""Requests that end in every way but the usual one: nobody hangs, nothing leaks, and what was sampled is kept."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
import torch

from tests.engine.engine_setup import (
    DEADLINE_S,
    ROUNDED,
    VOCAB,
    Reply,
    assert_empty,
    engine_of,
    plain,
    plain_logprobs,
    reply_to,
    serve,
    serve_all,
    tiny,
)
from whet.engine.base import EngineFailed, EngineRefused
from whet.engine.embedded.engine import EmbeddedEngine
from whet.model.causal import prepare, random_causal
from whet.model.config import ModelConfig
from whet.model.digest import digests_of
from whet.transport.base import Stream
from whet.types import Chunk, Finish, Request, SamplingParams

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)


def ask(name: str, max_tokens: int = 20, **fields) -> Request:
    return Request(name, PROMPT, SamplingParams(max_tokens, 1.0, seed=sum(name.encode())), **fields)


def alone(request: Request) -> Reply:
    return serve_all(engine_of(tiny()), [request])[request.id]


class Gate:
    """Makes an engine's steps wait: each `allow()` lets one through; `open()` lets all."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._allowed, self._entered, self._free = threading.Semaphore(0), threading.Semaphore(0), False
        self._step = engine.core.step
        engine.core.step = self.step  # type: ignore[method-assign]

    def step(self):
        self._entered.release()
        assert self._free or self._allowed.acquire(timeout=DEADLINE_S)
        return self._step()

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.acquire, timeout=DEADLINE_S)

    def open(self) -> None:
        self._free = True
        self._allowed.release()


async def turns(times: int = 20) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


# Ends.


@pytest.mark.parametrize("place", [0, 3, 19])
def test_a_stop_token_ends_the_reply_and_is_its_last_token(place):
    free = alone(ask("a"))
    stop = free.tokens[place]
    first = free.tokens.index(stop)
    request = Request("a", PROMPT, SamplingParams(20, 1.0, stop_token_ids=(stop,), seed=ask("a").sampling.seed))
    reply = alone(request)
    assert reply.tokens == free.tokens[: first + 1]
    assert reply.finish is Finish.STOP


def test_one_token_may_be_all():
    reply = alone(ask("a", 1))
    assert reply.tokens == alone(ask("a")).tokens[:1]
    assert reply.finish is Finish.LENGTH


@pytest.mark.parametrize(("size", "sizes"), [(0, [20]), (1, [1] * 20), (7, [7, 7, 6]), (50, [20])])
def test_chunks_have_the_size_that_was_asked_for(size, sizes):
    reply = alone(ask("a", chunk_tokens=size))
    assert [len(chunk.tokens) for chunk in reply.chunks] == sizes
    assert reply.tokens == alone(ask("a")).tokens


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (Request("r", (), SamplingParams(1)), "no tokens"),
        (Request("r", (1,) * 60, SamplingParams(5)), "60 prompt tokens .* = 65, over the limit of 64"),
        (Request("r", (1, VOCAB), SamplingParams(5)), "token ids from 1 to 97"),
        (Request("r", (-1, 4), SamplingParams(5)), "token ids from -1 to 4"),
    ],
)
def test_what_can_never_run_is_refused(request_, words):
    with pytest.raises(EngineRefused, match=f"request r.*{words}"):
        serve_all(engine_of(tiny(), cache_tokens=64), [request_])


def test_the_limit_is_the_models_where_the_cache_is_larger():
    engine = engine_of(tiny(), cache_tokens=4096)
    assert engine.capabilities.max_tokens == 256
    with pytest.raises(EngineRefused, match="over the limit of 256"):
        serve_all(engine, [Request("r", (1,) * 250, SamplingParams(7))])


def test_a_request_that_just_fits_runs():
    reply = serve_all(engine_of(tiny(), cache_tokens=64), [Request("r", (1,) * 60, SamplingParams(4, 1.0))])["r"]
    assert len(reply.tokens) == 4


# Aborts, and consumers that leave.


def test_abort_before_the_first_step():
    engine = engine_of(tiny())

    async def play() -> Reply:
        await engine.pause()
        call = asyncio.create_task(reply_to(engine, ask("a")))
        await turns()
        await engine.abort("a")
        await engine.abort("unknown")
        return await call

    assert serve(engine, play).chunks == (Chunk((), (), 0, Finish.ABORT),)


def test_abort_in_the_same_breath_as_the_request():
    engine = engine_of(tiny())

    async def play() -> Reply:
        call = asyncio.create_task(reply_to(engine, ask("a")))
        await asyncio.sleep(0)
        await engine.abort("a")
        return await call

    assert serve(engine, play).chunks == (Chunk((), (), 0, Finish.ABORT),)


def test_abort_while_waiting_leaves_the_running_one_alone():
    engine = engine_of(tiny(), max_running=1)

    async def play() -> tuple[Reply, Reply]:
        one, two = (asyncio.create_task(reply_to(engine, ask(name))) for name in ("a", "b"))
        while not engine.core.scheduler.running:
            await asyncio.sleep(0)
        await engine.abort("b")
        return await one, await two

    one, two = serve(engine, play)
    assert one.tokens == alone(ask("a")).tokens
    assert (two.tokens, two.finish) == ((), Finish.ABORT)


def test_abort_while_running_keeps_what_was_sampled():
    engine = engine_of(tiny())
    request = ask("a", 60, chunk_tokens=2)

    async def play() -> list[Chunk]:
        chunks: list[Chunk] = []
        async for chunk in engine.generate(request):
            chunks.append(chunk)
            if len(chunks) == 3:
                await engine.abort("a")
                await engine.abort("a")
        return chunks

    chunks = serve(engine, play)
    tokens = tuple(t for chunk in chunks for t in chunk.tokens)
    assert 6 <= len(tokens) < 60 and chunks[-1].finish is Finish.ABORT
    assert tokens == alone(ask("a", 60)).tokens[: len(tokens)]


def test_a_consumer_that_leaves_frees_its_request_and_its_name():
    engine = engine_of(tiny())

    async def play() -> Reply:
        for _ in range(3):
            stream = engine.generate(ask("a", 200, chunk_tokens=1))
            await anext(stream)
            await stream.aclose()
        return await reply_to(engine, ask("a"))

    assert serve(engine, play).tokens == alone(ask("a")).tokens


def test_a_conversation_that_times_out_and_is_released_leaves_nothing():
    engine = engine_of(tiny())

    async def one(name: str) -> None:
        engine.open(name)
        try:
            async with asyncio.timeout(0.05):
                while True:
                    await reply_to(engine, ask(name, 200, conversation=name))
        except TimeoutError:
            pass
        finally:
            engine.release(name)

    async def play() -> None:
        await asyncio.gather(*(one(f"c{i}") for i in range(6)))
        while engine.core.has_work:
            await asyncio.sleep(0.001)

    serve(engine, play)


def test_release_under_a_running_request_lets_it_end():
    engine = engine_of(tiny())

    async def play() -> Reply:
        engine.open("c")
        call = asyncio.create_task(reply_to(engine, ask("a", conversation="c")))
        while not engine.core.scheduler.running:
            await asyncio.sleep(0)
        engine.release("c")
        return await call

    assert serve(engine, play).tokens == alone(ask("a")).tokens


def test_an_id_that_is_running_is_not_taken_twice():
    engine = engine_of(tiny())

    async def play() -> Reply:
        first = asyncio.create_task(reply_to(engine, ask("a")))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="'a' is already running"):
            await reply_to(engine, ask("a"))
        return await first

    assert serve(engine, play).tokens == alone(ask("a")).tokens


def test_a_late_close_of_a_finished_stream_does_not_end_its_successor():
    engine = engine_of(tiny())

    async def play() -> Reply:
        stream = engine.generate(ask("a", 2))
        assert (await anext(stream)).finish is Finish.LENGTH
        second = asyncio.create_task(reply_to(engine, ask("a")))
        await turns(3)
        await stream.aclose()
        return await second

    assert serve(engine, play).finish is Finish.LENGTH


# Errors.


def test_a_step_that_fails_ends_its_requests_and_the_next_ones_run():
    engine = engine_of(tiny(), max_running=2)
    step, count = engine.core.step, 0

    def failing():
        nonlocal count
        count += 1
        if count == 5:
            engine.core.scheduler.plan()  # half way through a step
            raise ArithmeticError("no such number")
        return step()

    engine.core.step = failing  # type: ignore[method-assign]
    names = ("a", "b", "c")

    async def play() -> Reply:
        engine.open("k")
        await reply_to(engine, ask("k", 2, conversation="k"))
        ends = await asyncio.gather(*(reply_to(engine, ask(n)) for n in names), return_exceptions=True)
        for name, end in zip(names, ends, strict=True):
            assert isinstance(end, EngineFailed) and isinstance(end.__cause__, ArithmeticError)
            assert f"request {name}: a step failed: ArithmeticError: no such number" in str(end)
        assert not engine.core.scheduler.running and not engine.core.scheduler.waiting
        reply = await reply_to(engine, ask("a"))
        engine.release("k")
        return reply

    assert serve(engine, play).tokens == alone(ask("a")).tokens


def test_a_model_that_has_diverged_is_an_error_and_poisons_nothing():
    model = random_causal(tiny().config, ModelConfig(path="", dtype="float64", device="cpu"), seed=0)
    engine = engine_of(model, shares=False)
    good = {name: tensor.detach().clone() for name, tensor in model.named_weights()}

    async def play() -> Reply:
        await engine.update([(n, torch.full_like(t, torch.nan)) for n, t in good.items()], 1)
        with pytest.raises(EngineFailed, match="not finite"):
            await reply_to(engine, ask("a"))
        await engine.update(good.items(), 2)
        return await reply_to(engine, short)

    short = Request("b", PROMPT[:5], SamplingParams(5, 1.0))  # ends within a block that the broken weights filled
    assert serve(engine, play).tokens == alone(short).tokens


def test_a_score_given_up_while_it_is_computed_does_not_stop_the_engine():
    engine = engine_of(tiny())
    begun, go_on, score = threading.Event(), threading.Event(), engine.core.score

    def slow(*args):
        begun.set()
        assert go_on.wait(DEADLINE_S)
        return score(*args)

    engine.core.score = slow  # type: ignore[method-assign]

    async def play() -> Reply:
        scoring = asyncio.create_task(engine.score(PROMPT))
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        go_on.set()
        return await reply_to(engine, ask("a"))

    assert serve(engine, play).tokens == alone(ask("a")).tokens


def test_a_name_taken_again_during_a_step_does_not_get_the_old_ones_end():
    engine = engine_of(tiny())
    gate = Gate(engine)

    async def play() -> Reply:
        old = asyncio.create_task(reply_to(engine, ask("a", 1)))
        await gate.entered()
        old.cancel()
        await asyncio.gather(old, return_exceptions=True)
        new = asyncio.create_task(reply_to(engine, ask("a")))
        await turns()
        gate.open()
        return await new

    assert serve(engine, play).tokens == alone(ask("a")).tokens


def test_a_runner_that_is_cancelled_tells_those_who_wait():
    engine = engine_of(tiny())

    async def play() -> Reply:
        call = asyncio.create_task(reply_to(engine, ask("a", 200)))
        while engine.core.num_computed < 20:
            await asyncio.sleep(0)
        for task in asyncio.all_tasks():
            if task.get_name() == "engine":
                task.cancel()
        with pytest.raises(EngineFailed, match="closed"):
            await call
        return await reply_to(engine, ask("a"))

    assert serve(engine, play).tokens == alone(ask("a")).tokens


def test_a_thread_that_is_gone_is_an_error():
    engine = engine_of(tiny())
    engine._runner._thread.shutdown()
    with pytest.raises(EngineFailed, match="shutdown"):
        serve_all(engine, [ask("a")])


def test_a_call_that_nobody_waits_for_any_more_does_not_stop_the_engine():
    engine = engine_of(tiny())
    gate = Gate(engine)

    async def play() -> Reply:
        call = asyncio.create_task(reply_to(engine, ask("a")))
        await gate.entered()
        scores = [asyncio.create_task(engine.score(PROMPT)) for _ in range(2)]
        await turns()
        for task in scores:
            task.cancel()
        await asyncio.gather(*scores, return_exceptions=True)
        gate.open()
        return await call

    assert serve(engine, play).tokens == alone(ask("a")).tokens


# Updates and pauses.


def test_an_update_splits_chunks_and_no_token_sees_older_keys():
    model = random_causal(tiny().config, ModelConfig(path="", dtype="float64", device="cpu"), seed=0)
    engine = engine_of(model, shares=False, max_running=3)
    names = ("a", "b", "c", "d")

    async def play() -> tuple[list[Reply], Reply]:
        engine.open("k")
        kept = await reply_to(engine, ask("k", 4, conversation="k"))
        calls = [asyncio.create_task(reply_to(engine, ask(n, 30))) for n in names]
        while not any(s.num_sampled >= 10 for s in engine.core.scheduler.running):
            await asyncio.sleep(0)
        receipt = await engine.update(tiny(seed=1).named_weights(), 7)
        assert (receipt.version, engine.version) == (7, 7)
        assert receipt.wire == digests_of(tiny(seed=1).named_weights())
        assert receipt.resident == digests_of(tiny(seed=1).named_state())
        history = Request("k/1", PROMPT + kept.tokens, SamplingParams(5, 1.0), "k")
        replies, after = await asyncio.gather(asyncio.gather(*calls), reply_to(engine, history))
        engine.release("k")
        return [*replies, after], kept

    replies, kept = serve(engine, play)
    prompts = [PROMPT] * 4 + [PROMPT + kept.tokens]
    assert {tuple(sorted(set(reply.versions))) for reply in replies} == {(0, 7), (7,)}
    for prompt, reply in zip(prompts, replies, strict=True):
        assert list(reply.versions) == sorted(reply.versions)
        assert [chunk.version for chunk in reply.chunks] == sorted(set(reply.versions))
        for version, seed in ((0, 0), (7, 1)):
            table = plain_logprobs(plain(seed=seed), prompt + reply.tokens)[len(prompt) - 1 : -1]
            for i, token in enumerate(reply.tokens):
                if reply.versions[i] == version:
                    assert reply.logprobs[i] == pytest.approx(float(table[i, token]), rel=ROUNDED, abs=1e-8)


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(change):
    model = random_causal(tiny().config, ModelConfig(path="", dtype="float64", device="cpu"), seed=0)
    engine = engine_of(model, shares=False)
    weights = dict(tiny(seed=1).named_weights())
    name = "model.norm.weight"
    if change == "missing":
        del weights[name]
    elif change == "unknown":
        weights[name := "lm_head.bias"] = torch.zeros(VOCAB)
    else:
        weights[name] = torch.zeros(3)

    async def play() -> Reply:
        with pytest.raises(ValueError, match=name):
            await engine.update(weights.items(), 1)
        assert engine.version == 0
        return await reply_to(engine, ask("a"))

    assert serve(engine, play).tokens == alone(ask("a")).tokens


def test_pause_waits_for_the_running_step_and_no_other_begins():
    engine = engine_of(tiny())
    gate = Gate(engine)

    async def play() -> Reply:
        call = asyncio.create_task(reply_to(engine, ask("a")))
        await gate.entered()
        pausing = asyncio.create_task(engine.pause())
        await turns()
        assert not pausing.done()
        gate.open()
        await pausing
        computed = engine.core.num_computed
        assert computed == len(PROMPT)
        scores = (await engine.score(PROMPT)).logprobs
        assert len(scores) == len(PROMPT) - 1
        computed = engine.core.num_computed
        await asyncio.sleep(0.02)
        assert engine.core.num_computed == computed and not call.done()
        await engine.resume()
        return await call

    assert serve(engine, play).tokens == alone(ask("a")).tokens


def test_score_finds_room_in_a_full_pool():
    engine = engine_of(tiny(), cache_tokens=120, max_running=8)
    long = tuple((7 * i) % VOCAB for i in range(100))
    requests = [ask(f"r{i}", 30) for i in range(6)]

    async def play() -> tuple[list[Reply], list[float]]:
        calls = [asyncio.create_task(reply_to(engine, r)) for r in requests]
        while engine.core.num_computed < 60:
            await asyncio.sleep(0)
        scores = (await engine.score(long)).logprobs
        return await asyncio.gather(*calls), scores

    replies, scores = serve(engine, play)
    table = plain_logprobs(plain(), long)
    assert scores == pytest.approx([float(table[i, t]) for i, t in enumerate(long[1:])], abs=1e-8)
    assert [r.tokens for r in replies] == [alone(r).tokens for r in requests]


@pytest.mark.parametrize(
    ("tokens", "temperature", "words"),
    [((), 1.0, "no tokens"), ((1,) * 97, 1.0, "limit of 96"), ((1, 2), 0.0, "above 0"), ((1, 99), 1.0, "99")],
)
def test_what_cannot_be_scored_is_refused(tokens, temperature, words):
    engine = engine_of(tiny(), cache_tokens=96)

    async def play() -> None:
        with pytest.raises(ValueError, match=words):
            await engine.score(tokens, temperature)

    serve(engine, play)


# The end of the engine, and of its event loop.


def test_close_tells_everyone_who_waits():
    engine = engine_of(tiny(), max_running=1)
    gate = Gate(engine)

    async def play() -> None:
        calls = [asyncio.create_task(reply_to(engine, ask(n))) for n in ("running", "waiting")]
        await gate.entered()
        calls.append(asyncio.create_task(engine.score(PROMPT)))
        calls.append(asyncio.create_task(reply_to(engine, ask("posted"))))
        await turns()
        closing = asyncio.create_task(engine.close())
        await turns()
        assert not closing.done(), "a running step is waited for"
        gate.open()
        await closing
        for end in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(end, EngineFailed) and "closed" in str(end)
        for late in (reply_to(engine, ask("late")), engine.score(PROMPT), engine.update((), 1)):
            with pytest.raises(EngineFailed, match="closed"):
                await late
        engine.release("late")

    serve(engine, play)


def test_close_tells_those_who_wait_in_a_paused_engine():
    engine = engine_of(tiny())

    async def play() -> None:
        await engine.pause()
        call = asyncio.create_task(reply_to(engine, ask("a")))
        await turns()
        await engine.close()
        with pytest.raises(EngineFailed, match="request a: the engine was closed"):
            await call

    serve(engine, play)


def test_an_engine_outlives_its_event_loop():
    engine = engine_of(tiny())

    async def leave_midway() -> None:
        engine.open("gone")
        stream = engine.generate(ask("gone", 200, chunk_tokens=1, conversation="gone"))
        tasks = [asyncio.create_task(reply_to(engine, ask(f"r{i}", 200))) for i in range(3)]
        await anext(stream)
        assert len(tasks) == 3

    for _ in range(2):
        asyncio.run(leave_midway())
        engine.release("gone")  # outside any loop

    async def play() -> Reply:
        return await reply_to(engine, ask("a"))

    assert serve(engine, play).tokens == alone(ask("a")).tokens


def test_an_idle_engine_runs_no_task():
    engine = engine_of(tiny())

    async def play() -> None:
        await reply_to(engine, ask("a"))
        await turns()
        assert {task.get_name() for task in asyncio.all_tasks()} & {"engine"} == set()

    serve(engine, play)


# The deterministic engine's barrier.


def test_no_step_while_an_open_conversation_is_away():
    engine = engine_of(tiny(), deterministic=True)

    async def play() -> None:
        for name in ("a", "b", "never"):
            engine.open(name)
        one = asyncio.create_task(reply_to(engine, ask("a", conversation="a")))
        await asyncio.sleep(0.02)
        two = asyncio.create_task(reply_to(engine, ask("b", 3, conversation="b")))
        await asyncio.sleep(0.02)
        assert engine.core.num_computed == 0
        engine.release("never")
        assert len((await two).tokens) == 3
        computed = engine.core.num_computed
        await asyncio.sleep(0.02)
        assert engine.core.num_computed == computed and not one.done()
        engine.release("b")
        assert len((await one).tokens) == 20
        engine.release("a")

    serve(engine, play)


def test_a_refused_or_failed_conversation_holds_the_others_only_until_its_release():
    engine = engine_of(tiny(), deterministic=True, cache_tokens=64)

    async def one(name: str) -> str:
        engine.open(name)
        try:
            if name == "broken":
                await asyncio.sleep(0.01)
                raise ArithmeticError
            if name == "impatient":
                async with asyncio.timeout(0.005):
                    await reply_to(engine, ask(name, conversation=name))
            size = 100 if name == "long" else 10
            return str(len((await reply_to(engine, ask(name, size, conversation=name))).tokens))
        except Exception as error:
            return type(error).__name__
        finally:
            engine.release(name)

    async def play() -> list[str]:
        return await asyncio.gather(*map(one, ("fine", "long", "broken", "impatient", "good")))

    assert serve(engine, play) == ["10", "EngineRefused", "ArithmeticError", "TimeoutError", "10"]


def steps_of_rollouts(delays: list[float]) -> tuple[list[list[tuple[str, int]]], list[tuple[float, ...]]]:
    """Three-turn conversations whose tools take these times: what each step computed, and all log-probs."""
    engine = engine_of(tiny(dtype="float32"), deterministic=True, max_running=5, cache_tokens=300)
    plan, plans = engine.core.scheduler.plan, []

    def noted():
        planned = plan()
        plans.append([(s.request.id, new) for s, new in planned])
        return planned

    engine.core.scheduler.plan = noted  # type: ignore[method-assign]

    async def one(i: int) -> tuple[float, ...]:
        name = f"c{i}"
        engine.open(name)
        try:
            history, logprobs = PROMPT[: 4 + i // 2], ()
            for turn in range(3):
                request = Request(f"{name}/{turn}", history, SamplingParams(3 + (5 * i + turn) % 7, 1.0, seed=i), name, (i,))
                reply = await reply_to(engine, request)
                history, logprobs = history + reply.tokens + (i, turn), logprobs + reply.logprobs
                await asyncio.sleep(delays[(3 * i + turn) % len(delays)])
            return logprobs
        finally:
            engine.release(name)

    async def play():
        return await asyncio.gather(*(one(i) for i in range(8)))

    return plans, serve(engine, play)


def test_batch_composition_does_not_depend_on_timing():
    calm = steps_of_rollouts([0.0])
    hectic = steps_of_rollouts([0.004, 0.0, 0.001, 0.0, 0.0, 0.007, 0.002])
    assert calm == hectic  # the same steps, and the same bits


def test_a_model_on_loan_is_read_where_it_lies():
    model = prepare(tiny().hf, ModelConfig(path="", dtype="float64", device="cpu"), trainable=True)
    engine = engine_of(model)

    async def play() -> None:
        receipt = await engine.update(model.named_weights(), 3)
        assert receipt.wire == digests_of(model.named_weights())
        assert receipt.resident == digests_of(model.named_state())
        with contextlib.suppress(EngineRefused):
            await reply_to(engine, ask("a", 1000))
        assert (await reply_to(engine, ask("a", 2))).versions == (3, 3)

    serve(engine, play)
    assert_empty(engine)


def test_a_flush_forgets_what_is_cached_and_changes_nothing_that_is_said():
    undisturbed = alone(ask("a"))
    engine = engine_of(tiny())

    async def play():
        stream = engine.generate(ask("a", chunk_tokens=5))
        chunks = [await anext(stream)]
        await engine.pause()
        before = engine.core.num_computed
        await engine.flush()
        pool = engine.core.scheduler.pool
        assert pool.num_free == pool.num_blocks and engine.core.store.size_bytes == 0
        await engine.resume()
        chunks += [chunk async for chunk in stream]
        assert engine.core.num_computed - before > 20  # its prompt and first tokens once more
        return tuple(token for chunk in chunks for token in chunk.tokens)

    assert serve(engine, play) == undisturbed.tokens


def test_a_request_that_comes_while_weights_arrive_waits_for_them():
    engine = engine_of(random_causal(tiny().config, ModelConfig(path="", dtype="float64", device="cpu"), seed=0), shares=False)
    other = random_causal(tiny().config, ModelConfig(path="", dtype="float64", device="cpu"), seed=1)
    arriving, come = threading.Event(), threading.Event()

    def slowly():
        for name, tensor in other.named_weights():
            yield name, tensor
            arriving.set()
            assert come.wait(DEADLINE_S)

    async def play():
        update = asyncio.create_task(engine.update(Stream(slowly()), 1))
        await asyncio.to_thread(arriving.wait, DEADLINE_S)
        asked = asyncio.create_task(reply_to(engine, Request("r", (1, 2, 3), SamplingParams(5, 0.0))))
        await asyncio.sleep(0.05)
        assert not asked.done()
        come.set()
        await update
        return await asked

    assert serve(engine, play).versions == (1,) * 5


def test_a_score_counts_as_a_step_and_new_weights_do_not():
    """They may take longer, and have a deadline of their own."""
    model = random_causal(tiny().config, ModelConfig(path="", dtype="float64", device="cpu"), seed=0)
    engine, seen = engine_of(model, shares=False), []
    whole = [(name, tensor.clone()) for name, tensor in model.named_weights()]

    def weights():
        for found in whole:
            seen.append(engine._runner.step_s)
            yield found

    async def play():
        await engine.update(Stream(weights()), 1)
        assert set(seen) == {0.0}
        score = engine.core.score
        engine.core.score = lambda *asked: seen.append(engine._runner.step_s) or score(*asked)
        await engine.score((1, 2, 3))
        assert seen[-1] > 0 == (await engine.health()).step_s

    serve(engine, play)

def test_a_reply_says_how_long_it_waited_and_computed():
    engine = engine_of(tiny(), max_running=1)

    async def last_of(request):
        chunks = [chunk async for chunk in engine.generate(request)]
        assert all(chunk.latency is None for chunk in chunks[:-1])
        return chunks[-1].latency

    async def play():
        return await asyncio.gather(last_of(ask("a", chunk_tokens=4)), last_of(ask("b", chunk_tokens=4)))

    first, second = serve(engine, play)
    assert min(first.queue_s, second.queue_s) >= 0 and min(first.prefill_s, first.decode_s, second.prefill_s, second.decode_s) > 0
    assert second.queue_s > first.prefill_s + first.decode_s, "one runs at a time"


def test_a_reply_that_never_ran_has_no_latency():
    engine = engine_of(tiny(), max_running=1)

    async def play():
        gate = Gate(engine)
        running = asyncio.ensure_future(anext(engine.generate(ask("a"))))
        await gate.entered()
        waiting = asyncio.ensure_future(anext(engine.generate(ask("b"))))
        await asyncio.sleep(0)
        stopped = asyncio.ensure_future(engine.abort("b"))
        gate.open()
        await stopped
        return await waiting, await running

    cut, whole = serve(engine, play)
    assert cut.finish is Finish.ABORT and cut.latency is None and whole.latency is not None
