"""Replies of a random model that have to match a grammar do, alone and in company; their log-probs are of what they were drawn from."""

import asyncio
import json
import re
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.engine.engine_setup import ROUNDED, SHAPE, engine_of, plain_logprobs, reply_to, serve, serve_all
from whet.data.template import Renderer, load_tokenizer
from whet.engine.base import EngineFailed, EngineRefused
from whet.engine.embedded import core as core_module
from whet.engine.embedded import grammar as grammar_module
from whet.engine.embedded import grammar_trial
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.grammar import Grammars, Matching
from whet.engine.embedded.tokenizer import TokenizerFolder
from whet.engine.workers.copies import EngineCopies
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.quickstart.model import SmallModelConfig, make_model
from whet.types import Finish, Grammar, Request, SamplingParams

pytestmark = pytest.mark.long

VOCAB = 304
"""More than the tokenizer has, as many models do."""
END = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["pen", "apple", "ü"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 99}, "minItems": 1, "maxItems": 3},
        "inner": {"$ref": "#/$defs/inner"},
    },
    "required": ["name", "kind", "counts", "inner"],
    "additionalProperties": False,
    "$defs": {"inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}},
}
JSON_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))


def config():
    return Qwen3Config(head_dim=16, **(SHAPE | {"vocab_size": VOCAB, "max_position_embeddings": 1024, "initializer_range": 0.05}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("grammar") / "model"
    shape = SmallModelConfig(hidden_size=16, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=16, intermediate_size=16)
    make_model(path, ["How many pens are 3 and 4?"] * 8, shape, 0)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    assert len(tokenizer) < VOCAB
    return Grammars(Renderer(tokenizer), VOCAB)


@pytest.fixture(scope="module")
def model():
    return random_causal(config(), ModelConfig(path="", dtype="float64", device="cpu"), seed=0)


def ask(i, grammar=JSON_SCHEMA, **options):
    params = SamplingParams(**({"max_tokens": 600, "temperature": 1.0, "seed": i, "stop_token_ids": (END,), "grammar": grammar} | options))
    return Request(f"r{i}", (5, 60, 7, i % 50), params)


def text_of(tokenizer, reply):
    tokens = reply.tokens[:-1] if reply.tokens[-1] == END else reply.tokens
    return tokenizer.decode(list(tokens), skip_special_tokens=False)


def assert_valid(text):
    """By hand, not by the machinery that made it."""
    value = json.loads(text)
    assert list(value) == ["name", "kind", "counts", "inner"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 6 and value["kind"] in ("pen", "apple", "ü")
    assert 1 <= len(value["counts"]) <= 3 and all(type(x) is int and -9 <= x <= 99 for x in value["counts"])
    assert list(value["inner"]) == ["ok"] and value["inner"]["ok"] in (True, False)


def test_a_random_models_replies_parse_and_keep_to_the_schema_alone_and_together(model, tokenizer, grammars):
    requests = [ask(i, temperature=0.0 if i == 0 else 1.0) for i in range(12)]
    engine = engine_of(model, grammars=grammars, cache_tokens=8192)
    together = serve_all(engine, requests)
    for request in requests:
        reply = together[request.id]
        assert reply.finish is Finish.STOP and reply.tokens[-1] == END
        assert_valid(text_of(tokenizer, reply))
    assert len({reply.tokens for reply in together.values()}) == 12
    alone = serve_all(engine_of(model, grammars=grammars), requests[:1])
    assert alone["r0"] == together["r0"]
    for request in requests[1:4]:
        assert serve_all(engine_of(model, grammars=grammars), [request])[request.id].tokens == together[request.id].tokens


def test_log_probs_are_of_what_is_left_and_the_raw_ones_of_the_model(model, grammars):
    request = ask(3, raw_logprobs=True, top_logprobs=2, temperature=0.7, top_p=0.9)
    reply = serve_all(engine_of(model, grammars=grammars), [request])["r3"]
    hf = AutoModelForCausalLM.from_config(config(), attn_implementation="sdpa", dtype=torch.float64).eval()
    hf.load_state_dict(model.hf.state_dict())
    table = plain_logprobs(hf, (*request.tokens, *reply.tokens))[len(request.tokens) - 1 : -1]
    matching = grammars.begin(JSON_SCHEMA, (END,))
    raw = [x for chunk in reply.chunks for x in chunk.raw_logprobs]
    for row, token, logprob, own in zip(table, reply.tokens, reply.logprobs, raw, strict=True):
        assert own == pytest.approx(float(row[token]), rel=ROUNDED, abs=1e-8)
        left = torch.where(matching.allowed, row / 0.7, -torch.inf).softmax(-1)
        values, order = left.sort(descending=True, stable=True)
        kept = order[(values.cumsum(-1) - values < 0.9) & (values > 0)]
        assert token in kept.tolist()
        assert logprob == pytest.approx(float(torch.log(left[token] / left[kept].sum())), rel=ROUNDED, abs=1e-7)
        matching.take(token)


def test_preemption_and_new_weights_leave_every_reply_in_its_grammar(model, tokenizer, grammars):
    requests = [replace(request, chunk_tokens=8) for request in (ask(i) for i in range(8))]
    free = serve_all(engine_of(model, grammars=grammars, cache_tokens=8192), requests)
    longest = max(len(reply.tokens) for reply in free.values())
    narrow = engine_of(model, grammars=grammars, cache_tokens=4 * (longest // 2), block_size=4)
    cut = [replace(request, sampling=replace(request.sampling, max_tokens=longest)) for request in requests]
    assert narrow.core.max_tokens >= longest + 4
    crowded = serve_all(narrow, cut)
    assert narrow.core.scheduler.num_preempted > 0
    assert {name: reply.tokens for name, reply in crowded.items()} == {name: reply.tokens for name, reply in free.items()}

    held = random_causal(config(), ModelConfig(path="", dtype="float64", device="cpu"), seed=0)
    other = random_causal(config(), ModelConfig(path="", dtype="float64", device="cpu"), seed=1)
    engine = engine_of(held, shares=False, grammars=grammars, cache_tokens=8192)

    async def play():
        tasks = [asyncio.create_task(reply_to(engine, request)) for request in requests]
        while engine.core.num_computed < 120:
            await asyncio.sleep(0)
        await engine.update(list(other.named_weights()), 1)
        return await asyncio.gather(*tasks)

    replies = serve(engine, play)
    assert any(set(reply.versions) == {0, 1} for reply in replies)
    for reply in replies:
        assert reply.finish is Finish.STOP
        assert_valid(text_of(tokenizer, reply))


@pytest.mark.parametrize(
    ("grammar", "form"),
    [
        (Grammar("regex", "[0-9]{3}-(ab|cd)"), "[0-9]{3}-(ab|cd)"),
        (Grammar("ebnf", 'root ::= "x" ("y" | [0-9]) "z"\n'), "x(y|[0-9])z"),
        (Grammar("lark", 'start: "a" /[bc]{2}/\n'), "a[bc]{2}"),
    ],
)
def test_other_grammars_and_replies_without_a_stop_token_end_by_themselves(model, tokenizer, grammars, grammar, form):
    requests = [ask(i, grammar, stop_token_ids=(END,) if i % 2 else ()) for i in range(6)]
    for name, reply in serve_all(engine_of(model, grammars=grammars), requests).items():
        assert reply.finish is Finish.STOP and (reply.tokens[-1] == END) == (name in ("r1", "r3", "r5"))
        assert re.fullmatch(form, text_of(tokenizer, reply))


def test_the_end_is_drawn_where_the_grammar_has_one_and_nowhere_else(model, tokenizer, grammars):
    """After each digit the reply may end or go on; the bias makes it want to end before it may."""
    digits = Grammar("regex", "[0-9]{2,20}")
    replies = serve_all(engine_of(model, grammars=grammars), [ask(i, digits, logit_bias=((END, 100.0),)) for i in range(4)])
    assert {len(reply.tokens) for reply in replies.values()} == {3}
    (token,) = tokenizer.encode("7", add_special_tokens=False)
    stopped = serve_all(engine_of(model, grammars=grammars), [ask(0, digits, stop_token_ids=(token,), logit_bias=((token, 100.0),))])["r0"]
    assert stopped.tokens == (token,) and stopped.finish is Finish.STOP  # a stop token that the grammar has, too
    cut = serve_all(engine_of(model, grammars=grammars), [ask(0, max_tokens=5)])["r0"]
    assert cut.finish is Finish.LENGTH and len(cut.tokens) == 5


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", "{"), "json_schema: it is no valid JSON"),
        (Grammar("json_schema", "[]"), "json_schema: it is a JSON list, expected an object"),
        (Grammar("json_schema", '{"type": "objekt"}'), "json_schema: at its root: Invalid type: objekt"),
        (
            Grammar("json_schema", '{"properties": {"a": {"items": {"anyOf": [{}, {"not": {}}]}}}}'),
            'json_schema: at /properties/a/items/anyOf/1: Unimplemented keys: \\["not"\\]',
        ),
        (
            Grammar("json_schema", '{"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": 3}}}'),
            "json_schema: at /properties/a: ",
        ),
        (Grammar("regex", "(a"), "(?s:regex: .*unclosed group)"),
        (Grammar("regex", "a(?=b)"), "(?s:regex: .*look-around)"),
        (Grammar("ebnf", 'root := "a"'), "ebnf: .*line 1"),
        (Grammar("ebnf", 'root ::= "a" (\n'), "ebnf: "),
        (Grammar("lark", 'start: "a" foo'), 'lark: at 1\\(8\\): unknown name: "foo"'),
    ],
)
def test_a_grammar_that_cannot_be_used_is_refused_where_it_is_wrong(model, grammars, grammar, words):
    engine = engine_of(model, grammars=grammars)
    with pytest.raises(EngineRefused, match=f"request r1: {words}"):
        serve_all(engine, [ask(1, grammar)])


NOTHING = [
    Grammar("json_schema", '{"$ref": "#"}'),
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}'),
    Grammar("regex", r"[^\s\S]"),
    Grammar("regex", r"a[^\s\S]"),
    Grammar("ebnf", "root ::= root"),
    Grammar("ebnf", 'root ::= x "a"\nx ::= "b" y\ny ::= y'),
    Grammar("lark", "start: start"),
]
UNREAD = [
    Grammar("ebnf", ""),
    Grammar("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000),
    Grammar("ebnf", 'root ::= "\ud800"'),
    Grammar("regex", "\ud800"),
    Grammar("regex", "("),
    Grammar("regex", "a" * 200_000),
    Grammar("json_schema", '{"type": "integer", "minimum": 1e400}'),
    Grammar("json_schema", '{"anyOf": [' * 3000 + "{}" + "]}" * 3000),
    Grammar("lark", "start: \x00"),
]


def beside(engine, requests):
    """What comes of each request while all of them run."""

    async def play():
        return await asyncio.gather(*(reply_to(engine, request) for request in requests), return_exceptions=True)

    return serve(engine, play)


@pytest.mark.parametrize("grammar", NOTHING + UNREAD, ids=lambda grammar: f"{grammar.kind} {grammar.text[:20]!r}")
def test_a_grammar_that_no_reply_can_have_ends_its_own_request_alone(model, tokenizer, grammars, grammar):
    whole, failed, other = beside(engine_of(model, grammars=grammars), [ask(1), ask(2, grammar), ask(3)])
    assert isinstance(failed, EngineRefused) and str(failed).startswith("request r2: "), failed
    assert_valid(text_of(tokenizer, whole))
    assert_valid(text_of(tokenizer, other))


def test_an_empty_reply_needs_a_token_that_ends_it(model, grammars):
    empty = Grammar("regex", "")
    refused, whole = beside(engine_of(model, grammars=grammars), [ask(1, empty, stop_token_ids=()), ask(2, empty)])
    assert isinstance(refused, EngineRefused) and "no token ends a reply" in str(refused)
    assert whole.tokens == (END,)


def test_a_grammar_whose_steps_are_too_much_work_is_refused(grammars, monkeypatch):
    work = Grammar("ebnf", "root ::= " + " | ".join('"a" root "b"' for _ in range(20)))
    monkeypatch.setattr(grammar_module, "MAX_CPU_S", -1.0)
    with pytest.raises(ValueError, match=r"a step of it takes .* s of a processor, over the limit"):
        grammars.check(work)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="over the limit"):
        grammars.check(work)  # a refusal is kept, too
    with pytest.raises(ValueError, match=r"ebnf: .*Too many items"):
        grammars.check(Grammar("ebnf", "root ::= " + '"a"? ' * 10_000))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 99999989},
        {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (9973, 9967)]},
    ],
)
def test_a_grammar_that_takes_any_time_to_build_is_refused(grammars, schema):
    """Short, but of as many states as its number: built in a thread it would never end, and take all memory."""
    bomb = Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": schema, "b": {"type": "string"}}, "required": ["a"]}))
    for _ in range(2):
        with pytest.raises(ValueError, match="json_schema: it takes over 4 s of a processor or 512 MiB to build"):
            grammars.check(bomb)
    grammars.check(Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 60})))


def test_a_process_that_cannot_try_a_grammar_out_is_no_fault_of_the_grammar(grammars, monkeypatch, tmp_path):
    (tmp_path / "trial.py").write_text("import llguidance_that_is_not_there")
    monkeypatch.setattr(grammar_trial, "__file__", str(tmp_path / "trial.py"))
    asked = Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": 61}))
    with pytest.raises(RuntimeError, match=r"ended with status 1 before it began: .*trial\.py"):
        grammars.check(asked)
    monkeypatch.undo()
    grammars.check(asked)  # nothing was kept of it


def test_what_one_sequence_cannot_draw_from_is_its_own_failure(model, monkeypatch):
    adjusted = core_module.adjusted

    def without_choice(logits, sequences):
        logits = adjusted(logits, sequences).clone()
        logits[[i for i, sequence in enumerate(sequences) if sequence.request.id == "r2"]] = -torch.inf
        return logits

    monkeypatch.setattr(core_module, "adjusted", without_choice)
    plain = {"grammar": None, "max_tokens": 5}
    engine = engine_of(model)
    whole, failed, other = beside(engine, [ask(1, **plain), ask(2, **plain), ask(3, **plain)])
    assert isinstance(failed, EngineFailed) and "request r2: " in str(failed)
    monkeypatch.undo()
    alone = serve_all(engine_of(model), [ask(1, **plain), ask(3, **plain)])
    assert (whole.tokens, other.tokens) == (alone["r1"].tokens, alone["r3"].tokens)


def test_what_a_tokenizer_cannot_decode_ends_its_own_request_alone(model):
    def decode(tokens):
        raise OverflowError("no such token")

    engine = engine_of(model, decode=decode)
    plain = {"grammar": None, "max_tokens": 5}
    whole, failed = beside(engine, [ask(1, **plain), ask(2, **plain, stop=("x",))])
    assert len(whole.tokens) == 5
    assert isinstance(failed, EngineFailed) and "request r2: OverflowError: no such token" in str(failed)


def test_what_has_no_tokenizer_or_a_least_length_is_refused(model):
    with pytest.raises(EngineRefused, match="request r1 has a grammar, but the engine was made without a tokenizer"):
        serve_all(engine_of(model), [ask(1)])
    with pytest.raises(ValueError, match="min_tokens cannot be 3 with a grammar"):
        ask(1, min_tokens=3)


def test_a_grammar_that_becomes_too_much_ends_its_own_request_alone(model, tokenizer, grammars, monkeypatch):
    take, tired = Matching.take, []

    def fail_the_first(self, token):
        take(self, token)
        tired.append(self)
        if self is tired[0] and tired.count(self) == 4:
            self.failure = "limit reached"

    monkeypatch.setattr(Matching, "take", fail_the_first)
    engine = engine_of(model, grammars=grammars)

    async def play():
        return await asyncio.gather(*(reply_to(engine, ask(i)) for i in (1, 2)), return_exceptions=True)

    failed, whole = serve(engine, play)
    assert isinstance(failed, EngineRefused) and "request r1: its grammar cannot be followed any further: limit reached" in str(failed)
    assert_valid(text_of(tokenizer, whole))


def test_copies_read_grammars_too(folder, tokenizer):
    held = random_causal(config(), ModelConfig(path="", dtype="float64", device="cpu"), seed=0)
    sizes = EmbeddedConfig(cache_tokens=2048, block_size=4, copies=1)
    engine = EngineCopies(held, sizes, deterministic=False, tokenizer=TokenizerFolder(folder))
    try:

        async def play():
            with pytest.raises(EngineRefused, match="at its root: Invalid type"):
                await reply_to(engine, ask(0, Grammar("json_schema", '{"type": "objekt"}')))
            return await reply_to(engine, ask(3))

        reply = asyncio.run(asyncio.wait_for(play(), 120))
    finally:
        engine.end()
    assert reply.finish is Finish.STOP
    assert_valid(text_of(tokenizer, reply))
    with pytest.raises(EngineFailed):
        asyncio.run(reply_to(engine, ask(4)))
