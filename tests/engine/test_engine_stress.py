"""Two thousand requests of every kind through a pool that is too small: each comes out as if it had been alone, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from tests.engine.engine_setup import ROUNDED, VOCAB, engine_of, plain, serve, serve_all, tiny
from whet.engine.embedded.engine import EmbeddedEngine
from whet.engine.embedded.logits import adjusted
from whet.engine.embedded.sampler import sample
from whet.engine.embedded.scheduler import Sequence
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.types import Chunk, Finish, Request, SamplingParams

pytestmark = pytest.mark.long

NUM_GROUPS = 290
SEEDS = (0, 1)
"""Of the weights that the updates alternate between: version v holds those of SEEDS[v % 2]."""


@dataclass
class Heard:
    """A request and what its consumer heard of it."""

    request: Request
    chunks: list[Chunk]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for chunk in self.chunks for t in chunk.tokens)

    @property
    def finish(self) -> Finish | None:
        return self.chunks[-1].finish if self.chunks else None


def some_sampling(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randrange(1, 11),
        temperature=rng.choice((0.0, 0.7, 1.0, 1.0)),
        top_p=rng.choice((1.0, 1.0, 0.8)),
        top_k=rng.choice((0, 0, 15)),
        min_p=rng.choice((0.0, 0.0, 0.0, 0.2)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.4)),
        presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.7)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.0, -0.4)),
        logit_bias=rng.choice(((), (), ((3, 2.5), (40, -3.0)))),
        stop_token_ids=tuple(rng.sample(range(VOCAB), 4)),
        stop=rng.choice(((), (), ("<7>", "1><2"))),
        min_tokens=rng.choice((0, 0, 3)),
        seed=rng.getrandbits(63),
        top_logprobs=rng.choice((0, 0, 2)),
    )


def decode(tokens) -> str:
    return "".join(f"<{token}>" for token in tokens)


async def converse(
    engine: EmbeddedEngine, name: str, prompt: tuple[int, ...], rng: random.Random, log: list[Heard]
) -> None:
    """One to three turns; one request in eight is aborted, one in eight is left by its consumer."""
    engine.open(name)
    history = prompt
    try:
        for turn in range(rng.randrange(1, 4)):
            kind = rng.choice(("hear out",) * 6 + ("abort", "leave"))
            chunk_tokens = rng.choice((0, 1, 3)) if kind == "hear out" else 1
            request = Request(f"{name}/{turn}", history, some_sampling(rng), name, (rng.randrange(3),), chunk_tokens)
            heard = Heard(request, [])
            log.append(heard)
            stream = engine.generate(request)
            async for chunk in stream:
                heard.chunks.append(chunk)
                if kind == "leave":
                    break
                if kind == "abort":
                    await engine.abort(request.id)
            await stream.aclose()
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.002)))
            history += heard.tokens + tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(4)))
    finally:
        engine.release(name)


async def disturb(engine: EmbeddedEngine, rng: random.Random) -> None:
    """Updates, scores and pauses, one every 600 computed tokens, for as long as it is let."""
    while True:
        due = engine.core.num_computed + 600
        while engine.core.num_computed < due:
            await asyncio.sleep(0.001)
        what = rng.choice(("update", "score", "pause"))
        if what == "update":
            version = engine.version + 1
            await engine.update(tiny("small", seed=SEEDS[version % 2]).named_weights(), version)
        elif what == "score":
            await engine.score(tuple(rng.randrange(VOCAB) for _ in range(40)))
        else:
            await engine.pause()
            await asyncio.sleep(0.001)
            await engine.resume()


async def cut_off(task: asyncio.Task[None], after_s: float) -> None:
    await asyncio.sleep(after_s)
    task.cancel()


@torch.no_grad()
def expected_tokens(log: list[Heard]) -> list[tuple[list[int], list[float]]]:
    """What each request would have drawn alone, from plain transformers and the weights of each token's version."""
    sequences = [torch.tensor(heard.request.tokens + heard.tokens) for heard in log]
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)  # causal: padding behind changes nothing
    tables = [
        torch.cat([plain("small", seed=seed)(input_ids=part, use_cache=False).logits for part in padded.split(100)])
        for seed in SEEDS
    ]
    out: list[tuple[list[int], list[float]]] = []
    for i, heard in enumerate(log):
        versions = [chunk.version for chunk in heard.chunks for _ in chunk.tokens]
        first = len(heard.request.tokens)
        rows = [tables[version % 2][i, first - 1 + t] for t, version in enumerate(versions)]
        if rows:
            whole = [*heard.request.tokens, *heard.tokens]
            places = range(first, first + len(rows))
            logits = adjusted(torch.stack(rows), [Sequence(heard.request, 0, whole[:place]) for place in places])
            out.append(sample(logits, [heard.request.sampling] * len(rows), places)[:2])
        else:
            out.append(([], []))
    return out


def is_over(tokens: list[int], sampling: SamplingParams) -> bool:
    """Whether the last token ends a reply by itself."""
    texts = any(decode(tokens).count(text) > decode(tokens[:-1]).count(text) for text in sampling.stop)
    return len(tokens) >= sampling.min_tokens and (tokens[-1] in sampling.stop_token_ids or texts)


def run_the_crowd() -> tuple[EmbeddedEngine, list[Heard]]:
    rng = random.Random(11)
    model = random_causal(tiny("small").config, ModelConfig(path="", dtype="float64", device="cpu"), seed=SEEDS[0])
    engine = engine_of(model, shares=False, decode=decode, cache_tokens=140, max_running=24, max_batch_tokens=48)
    log: list[Heard] = []
    system = tuple(rng.randrange(VOCAB) for _ in range(12))

    async def play() -> None:
        disturbance = asyncio.create_task(disturb(engine, rng))
        tasks: list[asyncio.Task[None]] = []
        for group in range(NUM_GROUPS):
            prompt = system[: rng.choice((0, 0, 5, 9, 12))] + tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 14)))
            for k in range(rng.randrange(1, 7)):
                own = random.Random(f"{group}/{k}")
                tasks.append(asyncio.create_task(converse(engine, f"{group}/{k}", prompt, own, log)))
        cuts = [asyncio.create_task(cut_off(task, rng.random() * 2)) for task in rng.sample(tasks, 40)]
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(end) for end in ends} <= {type(None), asyncio.CancelledError}
        disturbance.cancel()
        await asyncio.gather(disturbance, *cuts, return_exceptions=True)
        while engine.core.has_work or engine._runner._posted:
            await asyncio.sleep(0.001)
        engine.core.scheduler.drop_caches()
        pool = engine.core.scheduler.pool
        assert pool.num_free == pool.num_blocks and not any(pool._holders)
        assert not engine._calls and not engine._open and not engine._runner._jobs

    serve(engine, play)
    return engine, log


def test_a_crowd_leaves_nothing_and_everyone_gets_what_they_would_have_got_alone():
    engine, log = run_the_crowd()
    assert len(log) > 1600
    finishes = Counter(heard.finish for heard in log)
    assert all(finishes[finish] > 20 for finish in (Finish.STOP, Finish.LENGTH, Finish.ABORT, None)), finishes
    assert engine.core.scheduler.num_preempted > 20
    crossing = [heard for heard in log if len({chunk.version for chunk in heard.chunks if chunk.tokens}) > 1]
    assert engine.version > 3 and len(crossing) > 5
    for heard, (tokens, logprobs) in zip(log, expected_tokens(log), strict=True):
        assert list(heard.tokens) == tokens, heard.request.id
        assert [x for chunk in heard.chunks for x in chunk.logprobs] == pytest.approx(logprobs, rel=ROUNDED, abs=1e-8)
        sampling = heard.request.sampling
        ends = [n for n in range(1, len(tokens) + 1) if is_over(tokens[:n], sampling)]
        if heard.finish is Finish.STOP:
            assert ends == [len(tokens)]
        else:
            assert not ends
        if heard.finish is Finish.LENGTH:
            assert len(tokens) == sampling.max_tokens
        assert sum(len(chunk.raw_logprobs) for chunk in heard.chunks) == (len(tokens) if sampling.top_logprobs else 0)
    whole = [heard for heard in log if heard.finish in (Finish.STOP, Finish.LENGTH) and heard not in crossing]
    unmoved = [heard for heard in whole if heard.chunks[0].version % 2 == 0][::40]
    assert len(unmoved) > 5
    for heard in unmoved:
        reply = serve_all(engine_of(tiny("small", seed=SEEDS[0]), decode=decode), [heard.request])[heard.request.id]
        assert (reply.tokens, reply.finish) == (heard.tokens, heard.finish)
