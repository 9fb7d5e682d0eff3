"""Tool calls, whole and streamed, from a model that writes what it is told to."""

import json

import pytest
from openai import OpenAI

from tests.serve.serve_setup import Live, scripted
from whet.data.template import Renderer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "né"}}\n</tool_call>'
USER = [{"role": "user", "content": "How many?"}]


def ask(models, text, **options):
    """The same question whole and streamed: the message and why it ended, twice."""
    with Live(scripted(models[0], text)) as server, OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", messages=USER, **options).choices[0]
        content, calls, finish, pieces = "", [], None, []
        for chunk in client.chat.completions.create(model="tiny", messages=USER, stream=True, **options):
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            pieces += [choice.delta.content] if choice.delta.content else []
            calls += choice.delta.tool_calls or []
            finish = choice.finish_reason or finish
        assert finish == whole.finish_reason
        assert content == (whole.message.content or "")
        assert [call.index for call in calls] == list(range(len(calls)))
        as_pairs = [
            [(call.function.name, json.loads(call.function.arguments)) for call in some] for some in (calls, whole.message.tool_calls or [])
        ]
        assert as_pairs[0] == as_pairs[1]
        return whole, as_pairs[0], pieces


def test_calls_are_parsed_and_what_is_said_before_them_is_streamed(models):
    whole, calls, pieces = ask(models, f"Let me see.\n{CALL}\n{CALL}", tools=[TOOL])
    assert whole.finish_reason == "tool_calls" and whole.message.content == "Let me see."
    assert calls == [("add", {"a": 1, "note": "né"})] * 2
    assert len({call.id for call in whole.message.tool_calls}) == 2
    assert len(pieces) > 3


def test_a_call_alone_has_no_content(models):
    whole, calls, _ = ask(models, CALL, tools=[TOOL])
    assert whole.message.content is None and len(calls) == 1


@pytest.mark.parametrize(
    "text", ["No call < tool > here, just <tool", f"Half a call: {CALL[:30]}", f"{CALL} and <tool_call>{{</tool_call>"]
)
def test_what_is_no_call_stays_the_text_that_it_is(models, text):
    whole, calls, _ = ask(models, text, tools=[TOOL])
    assert calls == [] and whole.message.content == text and whole.finish_reason == "stop"


def test_without_tools_nothing_is_read_as_a_call(models):
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        whole, calls, _ = ask(models, CALL, **options)
        assert calls == [] and whole.message.content == CALL and whole.finish_reason == "stop"


@pytest.mark.parametrize("writes_text", [False, True])
def test_the_next_turn_reads_the_calls_and_the_replies(models, writes_text):
    history = [
        *USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    with Live(scripted(models[0], "2")) as server:
        prompts = []
        generate = server.service.engine.generate

        def spy(request):
            prompts.append(server.service.renderer.decode(request.tokens))
            return generate(request)

        server.service.engine.generate = spy
        if writes_text:  # as Qwen3's template does; the client's way of writing JSON is not the model's
            tokenizer = server.service.renderer.tokenizer
            way = "(call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson))"
            text = tokenizer.chat_template.replace("call.function.arguments | tojson", way)
            server.service.renderer = Renderer(tokenizer, template=text)
        status, _ = server.send("/v1/chat/completions", {"messages": history, "tools": [TOOL]})
    assert status == 200
    assert "Tools: add(a)" in prompts[0]
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in prompts[0]
    assert "<tool_response>\n2\n</tool_response>" in prompts[0]
