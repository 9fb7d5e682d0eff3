"""OpenAI's responses, asked by OpenAI's own client."""

import json
import threading

import openai
import pytest
from openai import OpenAI

from tests.fakes import HANG
from tests.serve.dialects import ARGUMENTS, CALL, SCHEMA, events, prompts_of, thinker
from tests.serve.serve_setup import Live, assert_all_free, scheduler_of, scripted
from whet.engine.base import EngineFailed

PATH = "/v1/responses"
QUESTION = "How many pens are 3 and 4?"
ASK = {"model": "tiny", "input": QUESTION}
TOOLS = [{"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": True}]


@pytest.fixture(scope="module")
def client(shared):
    with OpenAI(base_url=f"{shared.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def client_of(server):
    return OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def said(response):
    """What a response says, without its ids and times."""
    items = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    return items, response.status, response.incomplete_details, response.usage.output_tokens, sorted(response.model_dump())


def ask(client, **options):
    """The same question whole and streamed; both say the same, and so does what the client makes of the events."""
    whole = client.responses.create(**{**ASK, **options})
    found = list(client.responses.create(**{**ASK, **options}, stream=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert [event.type for event in found[:2]] == ["response.created", "response.in_progress"]
    last = found[-1].response
    assert found[-1].type == f"response.{last.status}" and found[0].response.id == last.id
    assert found[0].response.status == "in_progress" and found[0].response.output == []
    done = [event.item for event in found if event.type == "response.output_item.done"]
    assert done == last.output
    check_items(found)
    assert said(last) == said(whole)
    return whole


WRITTEN = [
    [*begun, *(f"{kind}.delta" for _ in said), f"{kind}.done", *ended]
    for kind, begun, ended in (
        ("function_call_arguments", [], []),
        ("output_text", ["content_part.added"], ["content_part.done"]),
        ("reasoning_text", ["content_part.added"], ["content_part.done"]),
    )
    for said in ("", "x")
]
"""Events between an item's first and last: with and without anything said."""


def check_items(found):
    """Each item is begun, written and ended before the next one."""
    kinds: dict[int, list[str]] = {}
    texts: dict[int, str] = {}
    for event in found:
        if hasattr(event, "output_index"):
            assert event.output_index in (len(kinds) - 1, len(kinds))
            kinds.setdefault(event.output_index, []).append(event.type.removeprefix("response."))
            if event.type.endswith(".delta"):
                texts[event.output_index] = texts.get(event.output_index, "") + event.delta
            if event.type.endswith((".delta", "text.done", "arguments.done", "content_part.added", "content_part.done")):
                assert event.item_id
            if event.type.endswith(("_text.done", "arguments.done")):
                assert texts.get(event.output_index, "") == (event.arguments if event.type.endswith("arguments.done") else event.text)
    for steps in kinds.values():
        steps = list(dict.fromkeys(steps))
        assert steps[0] == "output_item.added" and steps[-1] == "output_item.done"
        assert steps[1:-1] in WRITTEN


def test_a_response_counts_its_tokens_and_says_that_it_is_cut(client, server):
    done = ask(client, max_output_tokens=7, temperature=1.3, top_p=0.9, extra_body={"seed": 1, "ignore_eos": True})
    prompt = server.service.renderer.encode(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")
    assert (done.status, done.incomplete_details.reason, done.model, done.object) == ("incomplete", "max_output_tokens", "tiny", "response")
    assert (done.usage.input_tokens, done.usage.output_tokens, done.usage.total_tokens) == (len(prompt), 7, len(prompt) + 7)
    assert (done.temperature, done.top_p, done.max_output_tokens) == (1.3, 0.9, 7)
    (item,) = done.output
    assert item.status == "incomplete" and done.output_text and not item.content[0].annotations


def test_a_seed_says_what_it_says_as_chat(client):
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, seed=5).choices[0].message.content
    assert ask(client, max_output_tokens=24, extra_body={"seed": 5}).output_text == chat


def test_logprobs_are_those_of_chat_whole_and_streamed(client):
    wanted = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 12, "extra_body": {"seed": 5}}
    messages = [{"role": "user", "content": QUESTION}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12, seed=5, logprobs=True, top_logprobs=2)
    expected = [(each.token, each.logprob, len(each.top_logprobs)) for each in chat.choices[0].logprobs.content]
    assert len(expected) == 12
    ((part,),) = (item.content for item in ask(client, **wanted).output)
    assert [(each.token, each.logprob, len(each.top_logprobs)) for each in part.logprobs] == expected
    found = list(client.responses.create(**ASK, **wanted, stream=True))
    (done,) = [event for event in found if event.type == "response.output_text.done"]
    assert [each.token for each in done.logprobs] == [token for token, _, _ in expected]
    told = [each.token for event in found if event.type == "response.output_text.delta" for each in event.logprobs]
    assert told == [token for token, _, _ in expected][: len(told)] and told, "each at most once, in their order"


def test_nothing_said_is_an_empty_message(models):
    with Live(scripted(models[0], "")) as server, client_of(server) as client:
        done = ask(client)
        assert done.status == "completed" and done.output_text == "" and [item.type for item in done.output] == ["message"]


def test_parallel_calls_are_items_of_their_own(models):
    with Live(scripted(models[0], f"Let me see.\n{CALL}\n{CALL}")) as server, client_of(server) as client:
        done = ask(client, tools=TOOLS)
        assert [item.type for item in done.output] == ["message", "function_call", "function_call"] and done.output_text == "Let me see."
        assert [(item.name, json.loads(item.arguments)) for item in done.output[1:]] == [("add", ARGUMENTS)] * 2
        assert len({item.call_id for item in done.output[1:]}) == 2 and done.status == "completed"
        assert ask(client, tools=TOOLS, tool_choice="none").output_text == f"Let me see.\n{CALL}\n{CALL}"
        with client.responses.stream(**ASK, tools=[{**TOOLS[0], "strict": False}]) as stream:
            stream.until_done()
            assert [item.type for item in stream.get_final_response().output] == ["message", "function_call", "function_call"]
    with Live(scripted(models[0], CALL)) as server, client_of(server) as client:
        assert [item.type for item in ask(client, tools=TOOLS).output] == ["function_call"]


def test_a_conversation_is_read_item_by_item(models):
    with Live(scripted(models[0], f"I add.\n{CALL}\n{CALL}")) as server, client_of(server) as client, prompts_of(server) as prompts:
        done = client.responses.create(**ASK, tools=TOOLS, instructions="Be good.")
        first, second = done.output[1:]
        history = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "input_text", "text": "How "}, {"type": "input_text", "text": "many?"}]},
            *done.output,
            {"type": "function_call_output", "call_id": first.call_id, "output": "7"},
            {"type": "function_call_output", "call_id": second.call_id, "output": [{"type": "input_text", "text": "8"}]},
            {"type": "message", "role": "user", "content": "And now?"},
        ]
        prompts.clear()
        client.responses.create(
            model="tiny", input=history, tools=TOOLS, instructions="Be good.", store=False, include=["reasoning.encrypted_content"]
        )
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "né"}}\n</tool_call>'
    assert prompts == [
        "<|im_start|>system\nBe good.\n\nBe brief.\nTools: add(a)<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n"
        f"<|im_start|>assistant\nI add.\n{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    ]


def test_a_tool_can_be_demanded_and_a_reply_keeps_to_its_schema(client):
    closed = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tools = [{**TOOLS[0], "parameters": closed}]
    for options in ({"tool_choice": "required", "parallel_tool_calls": False}, {"tool_choice": {"type": "function", "name": "add"}}):
        (call,) = ask(client, tools=tools, **options, extra_body={"seed": 3}).output
        assert call.type == "function_call" and json.loads(call.arguments)["a"] in (1, 2)
    form = {"format": {"type": "json_schema", "name": "answer", "schema": closed, "strict": True}}
    assert json.loads(ask(client, text=form, extra_body={"seed": 3}).output_text)["a"] in (1, 2)


def test_thinking_is_an_item_before_the_words_and_can_be_sent_back(models):
    thought = "3 and 4 are 7."
    with Live(thinker(models[0], f"<think>\n{thought}\n</think>\n\nSeven.\n{CALL}")) as server, client_of(server) as client:
        done = ask(client, tools=TOOLS)
        assert [item.type for item in done.output] == ["reasoning", "message", "function_call"]
        assert done.output[0].content[0].text == thought and done.output_text == "Seven."
        assert 0 < done.usage.output_tokens_details.reasoning_tokens < done.usage.output_tokens
        with client.responses.stream(**ASK, tools=[{**TOOLS[0], "strict": False}]) as stream:
            stream.until_done()
            assert stream.get_final_response().output[0].content[0].text == thought
        output = {"type": "function_call_output", "call_id": done.output[2].call_id, "output": "7"}
        with prompts_of(server) as prompts:
            client.responses.create(model="tiny", input=[{"role": "user", "content": "How many?"}, *done.output, output], tools=TOOLS)
            for effort, ends in (("none", "assistant\n<think>\n\n</think>\n\n"), ("low", "assistant\n")):
                client.responses.create(**ASK, reasoning={"effort": effort})
                assert prompts[-1].endswith(f"<|im_start|>{ends}")
    assert f"<|im_start|>assistant\n<think>\n{thought}\n</think>\n\nSeven.\n<tool_call>" in prompts[0]


CALLED = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
REFUSED = [
    ({"previous_response_id": "resp_1"}, "keeps no responses"),
    ({"store": True}, "keeps no responses"),
    ({"conversation": "conv_1"}, "conversation is not supported"),
    ({"background": True}, "background"),
    ({"include": ["file_search_call.results"]}, "file_search_call"),
    ({"top_logprobs": 2}, "message.output_text.logprobs in include"),
    ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "auto"}, "truncation"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"input": []}, "input is empty"),
    ({"input": [{"role": "assistant", "content": "7"}]}, "does not continue"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "keeps no responses"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "web_search_call"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input_image"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "7"}]}, "names no function_call"),
    ({"input": [{**CALLED, "arguments": "{"}, {"role": "user", "content": "x"}]}, "input.0: arguments"),
    ({"input": [{**CALLED, "arguments": "[]"}, {"role": "user", "content": "x"}]}, "expected an object"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}, {"role": "user", "content": "x"}]}, "encrypted"),
    ({"input": [{"role": "user", "content": "x", "colour": 1}]}, "input.0: colour"),
    ({"tools": [{"type": "web_search"}]}, "web_search"),
    ({"tools": [{"type": "function"}]}, "tools.0: name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "sub"}}, "not among tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "needs a schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format"),
    ({"temprature": 1}, "did you mean temperature"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[f"{next(iter(change))} {words}" for change, words in REFUSED])
def test_what_cannot_be_done_is_refused_by_its_name(server, change, words):
    for stream in (False, True):
        status, answer = server.send(PATH, {**ASK, **change, "stream": stream})
        assert status == 400 and words in answer["error"]["message"], answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.responses.create(**{**ASK, "model": "gpt-x"})


def test_an_engine_that_fails_is_an_error_or_a_response_that_failed(models):
    with Live(scripted(models[0], "Seven")) as server, client_of(server) as client:
        words = [(token, -0.1) for token in server.service.renderer.encode("Seven")]
        server.service.engine.script = lambda request: [EngineFailed("no memory")]
        with pytest.raises(openai.InternalServerError, match="no memory"):
            client.responses.create(**ASK)
        server.service.engine.script = lambda request: [*words, EngineFailed("no memory")]
        found = list(client.responses.create(**ASK, stream=True))
        assert found[-1].type == "response.failed" and "no memory" in found[-1].response.error.message
        assert [event.sequence_number for event in found] == list(range(len(found)))


def test_a_reply_that_is_ended_from_outside_has_failed_with_what_it_said(models):
    with Live(scripted(models[0], "Seven")) as server, client_of(server) as client:
        words = [(token, -0.1) for token in server.service.renderer.encode("Seven")]
        server.service.engine.script = lambda request: [*words, HANG]
        for stream in (False, True):
            answers = []

            def asked(stream=stream, answers=answers):
                answer = client.responses.create(**ASK, stream=stream)
                answers.append(list(answer)[-1].response if stream else answer)

            asking = threading.Thread(target=asked)
            asking.start()
            server.until(lambda: server.service.calls.num_open == 1)
            server.send("/abort_request", {"abort_all": True})
            asking.join(60)
            assert answers[0].status == "failed" and "aborted by /abort_request" in answers[0].error.message


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_nothing_in_the_engine(server, stream):
    connection = server.connect()
    body = {**ASK, "ignore_eos": True, "stream": stream}
    connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
    server.until(lambda: bool(scheduler_of(server).running))
    if stream:
        connection.getresponse().readline()
    connection.close()
    assert_all_free(server)


def test_the_events_have_names_and_nothing_follows_the_last(server):
    found = events(server, PATH, {**ASK, "max_output_tokens": 2, "ignore_eos": True})
    assert found[-1]["type"] == "response.incomplete"
