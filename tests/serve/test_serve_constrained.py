"""Replies that a client wants in a form: JSON, a schema, a regular expression, calls of its tools. The model is random, and they are."""

import json
import re

import openai
import pytest
from openai import OpenAI

from tests.serve.serve_setup import live

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "How many pens are 3 and 4?"}], "max_tokens": 450}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 999}, "unit": {"enum": ["pens", "apples"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 9}


def tool(name, **parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TWO = {"a": NUMBER, "b": {"$ref": "#/$defs/n"}}
ADD = tool("add", properties=TWO, required=["a", "b"], additionalProperties=False, **{"$defs": {"n": NUMBER}})
NOW = tool("now", type="object", properties={}, additionalProperties=False)


@pytest.fixture(scope="module")
def client(shared):
    with OpenAI(base_url=f"{shared.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def assert_answer(text):
    value = json.loads(text)
    assert list(value) == ["answer", "unit"] and type(value["answer"]) is int and 0 <= value["answer"] <= 999
    assert value["unit"] in ("pens", "apples")


def test_a_reply_keeps_to_its_schema_whole_and_streamed(client):
    for seed in range(4):
        done = client.chat.completions.create(**ASK, seed=seed, response_format=FORMAT).choices[0]
        assert done.finish_reason == "stop"
        assert_answer(done.message.content)
        stream = client.chat.completions.create(**ASK, seed=seed, response_format=FORMAT, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == done.message.content


def test_any_object_will_do_for_json_object(client):
    """The bias keeps a random model from writing for ever."""
    for seed in range(3):
        close = {"temperature": 0.5, "seed": seed, "response_format": {"type": "json_object"}}
        done = client.chat.completions.create(**ASK, **close).choices[0]
        assert done.message.content.lstrip().startswith("{")
        if done.finish_reason == "stop":
            assert isinstance(json.loads(done.message.content), dict)
    free = client.chat.completions.create(**ASK, seed=1, response_format={"type": "text"}).choices[0].message.content
    assert free == client.chat.completions.create(**ASK, seed=1).choices[0].message.content


def test_sglangs_fields_work_on_every_route(client, server):
    params = {"max_new_tokens": 200, "sampling_seed": 2}
    told = server.generate(text="Ann", return_logprob=True, sampling_params={**params, "regex": "[0-9]{3}"})
    assert re.fullmatch("[0-9]{3}", told["text"]) and told["meta_info"]["finish_reason"]["type"] == "stop"
    assert len(told["meta_info"]["output_token_logprobs"]) == len(told["output_ids"])
    assert_answer(server.generate(text="Ann", sampling_params={**params, "json_schema": json.dumps(SCHEMA)})["text"])
    ebnf = 'root ::= ("yes" | "no") "!"\n'
    assert server.generate(text="Ann", sampling_params={**params, "ebnf": ebnf, "ignore_eos": True})["text"] in ("yes!", "no!")
    each = server.generate(text=["a", "b"], sampling_params=[{**params, "regex": "x+y"}, {**params, "regex": "[ab]"}])
    assert re.fullmatch("x+y", each[0]["text"]) and each[1]["text"] in ("a", "b")
    done = client.completions.create(model="tiny", prompt="Ann", max_tokens=9, extra_body={"regex": "(pens|apples)"})
    assert done.choices[0].text in ("pens", "apples")
    said = client.chat.completions.create(**ASK, extra_body={"ebnf": ebnf}).choices[0].message.content
    assert said in ("yes!", "no!")


def test_a_required_tool_is_called_whole_and_streamed(client):
    counts = set()
    for seed in range(5):
        options = {"seed": seed, "tools": [ADD, NOW], "tool_choice": "required"}
        done = client.chat.completions.create(**ASK, **options).choices[0]
        if done.finish_reason == "length":  # it went on calling
            continue
        assert done.finish_reason == "tool_calls" and not done.message.content
        for call in done.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert call.function.name in ("add", "now") and set(arguments) == ({"a", "b"} if call.function.name == "add" else set())
        counts.add(len(done.message.tool_calls))
        stream = client.chat.completions.create(**ASK, **options, stream=True)
        streamed = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
        assert [call.function.arguments for call in streamed] == [call.function.arguments for call in done.message.tool_calls]
    assert counts
    for seed in range(3):
        one = client.chat.completions.create(**ASK, seed=seed, tools=[ADD, NOW], tool_choice="required", parallel_tool_calls=False)
        assert len(one.choices[0].message.tool_calls) == 1


def test_a_named_tool_is_called_once(client):
    choice = {"type": "function", "function": {"name": "add"}}
    for seed in range(3):
        message = client.chat.completions.create(**ASK, seed=seed, tools=[NOW, ADD], tool_choice=choice).choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "add" and set(json.loads(call.function.arguments)) == {"a", "b"}


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "expected an object"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"not": {}}}}}}},
            "response_format", "at /properties/a: Unimplemented keys",
        ),
        ({"response_format": FORMAT, "tools": [ADD]}, "tools", "set tool_choice to none"),
        ({"response_format": FORMAT, "regex": "a"}, "regex", "response_format and regex cannot both"),
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"regex": "a", "min_tokens": 2}, "min_tokens", "with a grammar"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice", "'sub', which is not among"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "function"),
        ({"tools": [tool("f", type="array")], "tool_choice": "required"}, "tools", "parameters of f must be the JSON schema of"),
        ({"tools": [tool("f", properties={"x": {"type": 1}})], "tool_choice": "required"}, "tools", "of f: json_schema: at /properties/x"),
        ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls", "can be false where"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_form_is_refused_by_its_name(server, options, param, words):
    status, answer = server.send("/v1/chat/completions", {**ASK, **options})
    assert status == 400 and answer["error"]["param"] == param and words in answer["error"]["message"], answer


def test_native_grammars_that_cannot_be_are_refused_by_their_name(server):
    for params, name in (({"json_schema": "{"}, "json_schema"), ({"regex": "("}, "regex"), ({"ebnf": "x", "regex": "a"}, "ebnf")):
        status, answer = server.send("/generate", {"text": "a", "sampling_params": params})
        assert status == 400 and answer["error"]["param"] == name, answer


def test_calls_cannot_be_asked_for_in_an_unknown_form(models):
    with live(models[0], parser="none") as server:
        status, answer = server.send("/v1/chat/completions", {**ASK, "tools": [ADD], "tool_choice": "required"})
    assert status == 400 and answer["error"]["param"] == "tool_choice" and "in hermes" in answer["error"]["message"]


def test_without_the_library_the_request_says_what_to_install(models, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with live(models[0]) as server, OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match=r"pip install 'whet\[grammar\]'") as error:
            client.chat.completions.create(**ASK, response_format=FORMAT)
        assert error.value.body["param"] == "response_format"
