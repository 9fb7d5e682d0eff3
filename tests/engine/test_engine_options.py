"""What a request may ask of sampling: each option against plain Python, alone and in company."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.engine_setup import ROUNDED, VOCAB, Reply, engine_of, plain, plain_logprobs, serve_all, tiny
from whet.engine.base import EngineRefused
from whet.engine.embedded.sampler import uniforms
from whet.engine.embedded.scheduler import Sequence
from whet.engine.embedded.stops import finish_of
from whet.types import Finish, Request, SamplingParams, text_before

PIECES = [bytes([97 + i % 26]) for i in range(60)] + [b"", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", "é€".encode(), b"abc", b"ca"]
PIECES += [bytes([48 + i]) + b"!" for i in range(VOCAB - len(PIECES))]


def decode(tokens) -> str:
    """A byte-level vocabulary: tokens may be parts of a character, several characters, or nothing."""
    return b"".join(PIECES[t] for t in tokens).decode("utf-8", "replace")


def expected_logits(row: list[float], params: SamplingParams, prompt: list[int], sampled: list[int]) -> list[float]:
    """Bias, penalties, and no stop token before `min_tokens`, in plain Python floats."""
    bias, counts = dict(params.logit_bias), Counter(sampled)
    out: list[float] = []
    for token, logit in enumerate(row):
        logit += bias.get(token, 0.0)
        if token in prompt or token in counts:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        if token in counts:
            logit -= params.presence_penalty + params.frequency_penalty * counts[token]
        early = len(sampled) < params.min_tokens and token in params.stop_token_ids
        out.append(-math.inf if early else logit)
    return out


def expected_chances(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p, in plain Python floats."""
    top = max(logits)
    if params.temperature == 0:
        return [float(i == logits.index(top)) for i in range(len(logits))]
    weights = [math.exp((x - top) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: params.top_k or None]
    total, kept = sum(weights[i] for i in order), []
    for i in order:
        if params.top_p == 1 or sum(weights[j] for j in kept) / total < params.top_p:
            kept.append(i)
    kept = [i for i in kept if weights[i] >= params.min_p * weights[order[0]]]
    mass = sum(weights[i] for i in kept)
    return [weights[i] / mass if i in kept else 0.0 for i in range(len(logits))]


def any_sampling(rng: random.Random) -> SamplingParams:
    def maybe(value, default):
        return value if rng.random() < 0.4 else default

    return SamplingParams(
        max_tokens=rng.randrange(1, 14),
        temperature=rng.choice((0.0, 0.6, 1.0, 1.7)),
        top_p=maybe(rng.uniform(0.3, 0.99), 1.0),
        top_k=maybe(rng.randrange(1, 30), 0),
        min_p=maybe(rng.uniform(0.01, 0.5), 0.0),
        repetition_penalty=maybe(rng.uniform(0.6, 1.9), 1.0),
        presence_penalty=maybe(rng.uniform(-1, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-1, 2), 0.0),
        logit_bias=maybe(tuple((t, rng.uniform(-100, 5)) for t in rng.sample(range(VOCAB), 5)), ()),
        stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice((0, 2, 30)))),
        stop=maybe(tuple(rng.sample(("a", "e", "é", "ab", "1!", "3!4", "c"), 2)), ()),
        min_tokens=maybe(rng.randrange(1, 9), 0),
        seed=rng.getrandbits(63),
        raw_logprobs=rng.random() < 0.3,
        top_logprobs=maybe(rng.randrange(1, 6), 0),
    )


def check_reply(request: Request, reply: Reply) -> None:
    """Every token, log-prob and end, from plain transformers and plain Python."""
    params, prompt = request.sampling, list(request.tokens)
    asks = params.raw_logprobs or params.top_logprobs > 0
    raw = [x for chunk in reply.chunks for x in chunk.raw_logprobs]
    tops = [x for chunk in reply.chunks for x in chunk.top_logprobs]
    assert len(raw) == len(tops) == (len(reply.tokens) if asks else 0)
    table = plain_logprobs(plain(), request.tokens + reply.tokens)[len(prompt) - 1 : -1]
    hf_logits = plain()(input_ids=torch.tensor([request.tokens + reply.tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    for n, (token, logprob) in enumerate(zip(reply.tokens, reply.logprobs, strict=True)):
        sampled = list(reply.tokens[:n])
        chances = expected_chances(expected_logits(hf_logits[n].tolist(), params, prompt, sampled), params)
        if params.temperature == 0:
            assert (token, logprob) == (chances.index(1.0), 0.0)
        else:
            point = uniforms([params.seed], [len(prompt) + n])[0]
            below = sum(chances[:token])
            assert below - 1e-9 <= point <= below + chances[token] + 1e-9
            assert logprob == pytest.approx(math.log(chances[token]), rel=ROUNDED, abs=1e-8)
        if asks:
            assert raw[n] == pytest.approx(float(table[n, token]), rel=ROUNDED, abs=1e-8)
            best = table[n].topk(params.top_logprobs)
            assert [t for t, _ in tops[n]] == best.indices.tolist()
            assert [x for _, x in tops[n]] == pytest.approx(best.values.tolist(), abs=1e-8)
    assert reply.finish is expected_finish(reply.tokens, params)
    for n in range(1, len(reply.tokens)):
        assert expected_finish(reply.tokens[:n], params) is None


def expected_finish(tokens: tuple[int, ...], params: SamplingParams) -> Finish | None:
    """Why a reply of these tokens ends with the last of them, from the whole text."""
    stopped = tokens[-1] in params.stop_token_ids
    whole, before = decode(tokens), decode(tokens[:-1])
    stopped |= any(whole.count(text) > before.count(text) for text in params.stop)
    if stopped and len(tokens) >= params.min_tokens:
        return Finish.STOP
    return Finish.LENGTH if len(tokens) >= params.max_tokens else None


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_every_option_is_what_plain_python_says_and_company_changes_nothing(seed):
    rng = random.Random(seed)
    requests: list[Request] = []
    for i in range(30):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 9, 17))))
        requests += [Request(f"{i}/{k}", prompt, any_sampling(rng), f"{i}/{k}") for k in range(2)]
    engine = engine_of(tiny(), decode=decode, cache_tokens=96, max_batch_tokens=24)
    replies = serve_all(engine, requests)
    assert engine.core.scheduler.num_preempted > 0, "the pool was meant to be too small"
    assert {reply.finish for reply in replies.values()} == {Finish.STOP, Finish.LENGTH}
    for request in requests:
        check_reply(request, replies[request.id])
    for request in requests[::10]:
        alone = serve_all(engine_of(tiny(), decode=decode), [request])[request.id]
        assert (alone.tokens, alone.finish) == (replies[request.id].tokens, replies[request.id].finish)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(54, 70), min_size=1, max_size=25), st.sampled_from(["é", "€", "é€", "abc", "bca", "€c", "aa"]))
def test_a_stop_text_is_found_where_the_whole_text_has_it(tokens, stop):
    """Also where it begins and ends inside tokens, and where its characters are spread over several."""
    params = SamplingParams(100, stop=(stop,))
    sequence = Sequence(Request("r", (0, 97 - 1), params), 0, [0, 96])
    for n, token in enumerate(tokens, start=1):
        sequence.tokens.append(token)
        text = decode(tokens[:n])
        finish = finish_of(sequence, decode)
        assert finish is (Finish.STOP if stop in text else None)
        if finish:
            assert text_before(text, params.stop) == text[: text.index(stop)]
            return


def test_the_prompts_text_does_not_stop_a_reply():
    params = SamplingParams(100, stop=("ab",))
    sequence = Sequence(Request("r", (0,), params), 0, [0, 1])  # "a" | "b"
    assert finish_of(sequence, decode) is None
    sequence.tokens += [0, 1]
    assert finish_of(sequence, decode) is Finish.STOP


def test_text_is_cut_at_the_first_of_several_stops():
    assert text_before("one two three", ("three", "two", "four")) == "one "
    assert text_before("one", ()) == text_before("one", ("two",)) == "one"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stop": ("a",)}, "request r has stop texts, but the engine was made without a tokenizer"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "request r: logit_bias names token 97, but the model knows 0 to 96"),
        ({"stop_token_ids": (3, -1)}, "request r: stop_token_ids names token -1"),
        ({"stop_token_ids": tuple(range(VOCAB)), "min_tokens": 1}, "must leave a token that can be sampled"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(options, words):
    with pytest.raises(EngineRefused, match=words):
        serve_all(engine_of(tiny()), [Request("r", (1, 2), SamplingParams(3, **options))])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"temperature": math.inf}, "temperature must be finite and not negative, not inf"),
        ({"temperature": -1.0}, "temperature must be finite and not negative, not -1.0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], not 0.0"),
        ({"min_p": 1.5}, r"min_p must be in \[0, 1\], not 1.5"),
        ({"top_k": -1}, "top_k must not be negative, not -1"),
        ({"min_tokens": -1}, "min_tokens must not be negative, not -1"),
        ({"top_logprobs": -1}, "top_logprobs must not be negative, not -1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be in \[0.1, 10\]"),
        ({"presence_penalty": 3.0}, r"presence_penalty must be in \[-2, 2\], not 3.0"),
        ({"frequency_penalty": math.nan}, r"frequency_penalty must be in \[-2, 2\], not nan"),
        ({"logit_bias": ((5, -math.inf),)}, r"logit_bias must be in \[-100, 100\], not -inf \(token 5\)"),
        ({"logit_bias": ((5, 1.0), (5, 2.0))}, "logit_bias names a token twice"),
        ({"stop": ("a", "")}, "a stop text must not be empty"),
    ],
)
def test_options_without_a_meaning_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**({"max_tokens": 3} | options))
