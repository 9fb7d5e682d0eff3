"""Anthropic's routes, in the shapes that its official client reads (`tests/agents` asks with the client itself)."""

import json
import threading

import pytest

from tests.fakes import HANG
from tests.serve.dialects import ARGUMENTS, CALL, SCHEMA, events, prompts_of, thinker
from tests.serve.serve_setup import Live, assert_all_free, live, scheduler_of, scripted
from whet.engine.base import EngineFailed
from whet.serve import anthropic_messages
from whet.serve.access import Keys

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = [{"role": "user", "content": "How many pens are 3 and 4?"}]
ASK = {"model": "tiny", "max_tokens": 400, "messages": USER}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
KEY = "a-key-for-clients-only"


def text_block(text):
    return {"type": "text", "text": text}


def assembled(found):
    """The message that a client makes of a stream, in the order that it demands."""
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    message = {**found[0]["message"], "content": []}
    assert message["content"] == [] and message["stop_reason"] is None
    left = [event for event in found[2:] if event["type"] != "ping"]
    assert [event["type"] for event in left[-2:]] == ["message_delta", "message_stop"]
    written = ""
    for event in left[:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(dict(event["content_block"]))
            written = ""
        elif kind == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            assert event["index"] == len(message["content"]) - 1
            if delta["type"] == "input_json_delta":
                written += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                block[name] += delta[name]
        else:
            assert kind == "content_block_stop" and event["index"] == len(message["content"]) - 1
            if written:
                message["content"][-1]["input"] = json.loads(written)
    return {**message, **left[-2]["delta"], "usage": left[-2]["usage"]}


def ask(server, **options):
    """The same question whole and streamed; both say the same."""
    status, whole = server.send(PATH, {**ASK, **options})
    assert status == 200, whole
    streamed = assembled(events(server, PATH, {**ASK, **options}))

    def said(message):
        content = [{key: item for key, item in block.items() if key not in ("id", "signature")} for block in message["content"]]
        return content, message["stop_reason"], message["stop_sequence"], message["usage"]["output_tokens"], sorted(message)

    assert said(streamed) == said(whole)
    return whole


def test_a_message_counts_its_tokens_and_says_why_it_ended(server):
    done = ask(server, max_tokens=7, seed=1, ignore_eos=True)
    prompt = server.service.renderer.encode("<|im_start|>user\nHow many pens are 3 and 4?<|im_end|>\n<|im_start|>assistant\n")
    assert (done["type"], done["role"], done["model"], done["stop_reason"]) == ("message", "assistant", "tiny", "max_tokens")
    usage = done["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt) and usage["output_tokens"] == 7
    assert [block["type"] for block in done["content"]] == ["text"] and done["id"].startswith("msg_")
    assert server.send(COUNT, {"model": "tiny", "messages": USER}) == (200, {"input_tokens": len(prompt)})


def test_a_seed_says_what_it_says_as_openai_s_chat(server):
    chat = {"messages": USER, "seed": 5, "max_tokens": 24, "temperature": 1.3, "top_p": 0.9, "top_k": 40}
    said = server.send("/v1/chat/completions", chat)[1]["choices"][0]["message"]["content"]
    options = {key: value for key, value in chat.items() if key != "messages"}
    assert ask(server, **options)["content"] == [text_block(said)]


def test_more_tokens_than_there_is_room_for_are_as_many_as_there_is_room_for(server):
    done = ask(server, max_tokens=32_000, seed=1, ignore_eos=True)
    assert done["stop_reason"] == "max_tokens" and 400 < done["usage"]["output_tokens"] < 512


def test_a_stop_sequence_is_named_and_no_part_of_the_words(server, models):
    said = ask(server, seed=3, max_tokens=40)["content"][0]["text"]
    stop = said[10:12]
    done = ask(server, seed=3, max_tokens=40, stop_sequences=["never said", stop])
    assert (done["stop_reason"], done["stop_sequence"]) == ("stop_sequence", stop)
    assert done["content"] == [text_block(said[: said.index(stop)])]
    with Live(scripted(models[0], "Seven")) as scripting:
        done = ask(scripting, stop_sequences=["never said"])
        assert (done["stop_reason"], done["stop_sequence"]) == ("end_turn", None)
    with Live(scripted(models[0], "")) as scripting:
        assert ask(scripting)["content"] == []


def test_parallel_calls_are_blocks_of_their_own(models):
    with Live(scripted(models[0], f"Let me see.\n{CALL}\n{CALL}")) as server:
        done = ask(server, tools=TOOLS)
        assert [block["type"] for block in done["content"]] == ["text", "tool_use", "tool_use"]
        assert [(block["name"], block["input"]) for block in done["content"][1:]] == [("add", ARGUMENTS)] * 2
        assert done["stop_reason"] == "tool_use" and len({block["id"] for block in done["content"][1:]}) == 2
        assert len([event for event in events(server, PATH, {**ASK, "tools": TOOLS}) if event.get("delta", {}).get("text")]) > 3
        for options in ({}, {"tools": TOOLS, "tool_choice": {"type": "none"}}):
            done = ask(server, **options)
            assert done["content"] == [text_block(f"Let me see.\n{CALL}\n{CALL}")] and done["stop_reason"] == "end_turn"
    with Live(scripted(models[0], f"Half a call: {CALL[:30]}")) as server:
        assert ask(server, tools=TOOLS)["content"] == [text_block(f"Half a call: {CALL[:30]}")]


def test_a_conversation_is_read_block_by_block(models):
    cached = {"cache_control": {"type": "ephemeral"}}
    asked = {
        **ASK,
        "system": [{**text_block("Be good."), **cached}, text_block("Be brief.")],
        "messages": [
            {"role": "user", "content": "One"},
            {"role": "user", "content": [{**text_block("Two"), **cached}]},
            {
                "role": "assistant",
                "content": [
                    text_block("I add."),
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "t2", "name": "add", "input": {"a": 2}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text_block("7"), text_block("pens")]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no such pen", "is_error": True, **cached},
                    text_block("And now?"),
                ],
            },
            {"role": "system", "content": "Hurry."},
            {"role": "user", "content": "Well?"},
        ],
        "tools": [{**TOOLS[0], **cached, "type": "custom", "strict": True}],
        "metadata": {"user_id": "u"},
    }
    with Live(scripted(models[0], "7")) as server, prompts_of(server) as prompts:
        status, answer = server.send(PATH, asked, anthropic_version="2023-06-01", anthropic_beta="x-2026-01-01")
        assert status == 200, answer
        counted = {key: value for key, value in asked.items() if key not in ("max_tokens", "metadata")}
        assert server.send(COUNT, counted) == (200, {"input_tokens": answer["usage"]["input_tokens"]})
    assert prompts == [
        "<|im_start|>system\nBe good.\n\nBe brief.\nTools: add(a)<|im_end|>\n"
        "<|im_start|>user\nOne\n\nTwo<|im_end|>\n"
        '<|im_start|>assistant\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7\n\npens\n</tool_response>\n<tool_response>\nError: no such pen\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>system\nHurry.<|im_end|>\n<|im_start|>user\nWell?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ]


def test_a_tool_can_be_demanded(server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    tools = [{"name": "add", "input_schema": schema}]
    for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "add"}):
        done = ask(server, tools=tools, tool_choice=choice, seed=3)
        (call,) = done["content"]
        assert done["stop_reason"] == "tool_use" and call["name"] == "add" and call["input"]["a"] in (1, 2)


def test_a_reply_keeps_to_its_schema(server):
    schema = {"type": "object", "properties": {"unit": {"enum": ["pens", "apples"]}}, "required": ["unit"], "additionalProperties": False}
    done = ask(server, output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}}, seed=3)
    assert json.loads(done["content"][0]["text"])["unit"] in ("pens", "apples")


def test_thinking_is_a_block_before_the_words_and_can_be_sent_back(models):
    thought = "3 and 4 are 7."
    with Live(thinker(models[0], f"<think>\n{thought}\n</think>\n\nSeven.\n{CALL}")) as server, prompts_of(server) as prompts:
        assert [block["type"] for block in ask(server)["content"]] == ["thinking", "text"], "without tools a call is text"
        done = ask(server, tools=TOOLS)
        assert [block["type"] for block in done["content"]] == ["thinking", "text", "tool_use"]
        thinking, words, call = done["content"]
        assert thinking == {"type": "thinking", "thinking": thought, "signature": done["id"]} and words["text"] == "Seven."
        kinds = [event["delta"]["type"] for event in events(server, PATH, {**ASK, "tools": TOOLS}) if "index" in event and "delta" in event]
        assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": "7"}]}
        history = [*USER, {"role": "assistant", "content": done["content"]}, result]
        prompts.clear()
        assert server.send(PATH, {**ASK, "messages": history, "tools": TOOLS})[0] == 200
        assert f"<|im_start|>assistant\n<think>\n{thought}\n</think>\n\nSeven.\n<tool_call>" in prompts[0]
        prompts.clear()
        history += [{"role": "assistant", "content": "7"}, *USER]
        assert server.send(PATH, {**ASK, "messages": history, "tools": TOOLS})[0] == 200
        assert thought not in prompts[0] and "Seven." in prompts[0], "the template leaves out what was thought before the last question"


def test_a_reply_that_is_thinking_and_words_is_two_blocks(models):
    with Live(thinker(models[0], "<think>\nSo.\n</think>\n\nSeven.")) as server:
        assert [block["type"] for block in ask(server)["content"]] == ["thinking", "text"]


@pytest.mark.parametrize(
    ("thinking", "ends"),
    [
        (None, "assistant\n"),
        ({"type": "adaptive"}, "assistant\n"),
        ({"type": "enabled", "budget_tokens": 1024}, "assistant\n"),
        ({"type": "disabled"}, "assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_is_switched_by_the_variable_of_the_template(models, thinking, ends):
    with Live(thinker(models[0], "7")) as server, prompts_of(server) as prompts:
        assert server.send(PATH, {**ASK, "thinking": thinking})[0] == 200
    assert prompts[0].endswith(f"<|im_start|>{ends}")


def test_without_a_variable_thinking_is_as_the_model_has_it(models):
    with Live(scripted(models[0], "7")) as server:
        for kind in ("enabled", "disabled", "adaptive"):
            assert server.send(PATH, {**ASK, "thinking": {"type": kind}})[0] == 200
        renderer = server.service.renderer
        server.service.renderer = type(renderer)(renderer.tokenizer, template=renderer._template.source.rstrip() + "{{- '<think>\\n' }}")
        status, answer = server.send(PATH, {**ASK, "thinking": {"type": "disabled"}})
        assert status == 400 and "begins every reply with thinking" in answer["error"]["message"]
        assert server.send(PATH, {**ASK, "thinking": {"type": "enabled"}})[0] == 200


REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [*USER, {"role": "assistant", "content": "The answer is"}]}, "does not continue one"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "is media"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, "tool_use"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "7"}]}]}, "names no tool_use"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, *USER]}, "redacted_thinking"),
    ({"messages": [{"role": "user", "content": [{**text_block("x"), "colour": 1}]}]}, "messages.0.content.0: colour"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0: role"),
    ({"system": [{"type": "image"}]}, "system.0"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [{"name": "add"}]}, "input_schema"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "not among tools"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "disable_parallel_tool_use"),
    ({"stop_sequences": [""]}, "stop text"),
    ({"stop_sequences": [3]}, "stop_sequences"),
    ({"stop": ["x"]}, "stop is not supported"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"container": "x"}, "container is not supported"),
    ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "compact_20260112"),
    ({"messages": [{"role": "user", "content": "x" * 40_000}]}, "characters"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_cannot_be_done_is_refused_in_anthropic_s_form(server, change, words):
    for stream in (False, True):
        status, answer = server.send(PATH, {**ASK, **change, "stream": stream})
        assert status == 400 and set(answer) == {"type", "error"} and set(answer["error"]) == {"type", "message"}, answer
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error") and words in answer["error"]["message"]


def test_thinking_of_earlier_turns_may_be_cleared(server):
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert server.send(PATH, {**ASK, "max_tokens": 1, "context_management": edits})[0] == 200


def test_every_error_of_these_routes_has_that_form(models):
    def kind(found):
        status, answer = found
        assert set(answer) == {"type", "error"} and answer["type"] == "error"
        return status, answer["error"]["type"]

    with live(models[0], Keys(KEY, None), limits={"max_body_bytes": 2048}) as server:
        held = {"x_api_key": KEY}
        assert kind(server.send(PATH, ASK)) == (401, "authentication_error")
        assert kind(server.send(COUNT, ASK)) == (401, "authentication_error")
        assert server.send("/v1/completions", {"prompt": "a"})[1]["error"]["code"] == "invalid_api_key"
        assert server.send(PATH, {**ASK, "max_tokens": 1}, Authorization=f"Bearer {KEY}")[0] == 200
        assert server.send(PATH, {**ASK, "max_tokens": 1}, **held)[0] == 200
        assert kind(server.get(PATH, **held)) == (405, "invalid_request_error")
        assert kind(server.send(PATH, {**ASK, "model": "claude-x"}, **held)) == (404, "not_found_error")
        assert kind(server.send(PATH, {**ASK, "system": "x" * 4096}, **held)) == (413, "request_too_large")
        assert kind(server.send(PATH, b'{"max_tokens": 1, "max_tokens": 2}', **held)) == (400, "invalid_request_error")
        assert kind(server.send(PATH, b"{", **held)) == (400, "invalid_request_error")


def test_an_engine_that_fails_is_an_error_or_the_last_event(models):
    with Live(scripted(models[0], "Seven")) as server:
        engine = server.service.engine
        said = [(token, -0.1) for token in server.service.renderer.encode("Seven")]
        engine.script = lambda request: [EngineFailed("no memory")]
        status, answer = server.send(PATH, ASK)
        assert (status, answer["error"]["type"]) == (503, "overloaded_error") and "no memory" in answer["error"]["message"]
        engine.script = lambda request: [*said, EngineFailed("no memory")]
        found = events(server, PATH, ASK)
        assert found[-1]["type"] == "error" and found[-1]["error"]["type"] == "overloaded_error"
        assert "message_stop" not in [event["type"] for event in found]


def test_a_reply_that_is_ended_from_outside_is_no_message(models):
    with Live(scripted(models[0], "Seven")) as server:
        engine = server.service.engine
        engine.script = lambda request: [(token, -0.1) for token in server.service.renderer.encode("Seven")] + [HANG]
        for stream in (False, True):
            answers = []
            asked = {**ASK, "stream": stream}
            asking = threading.Thread(target=lambda asked=asked, answers=answers: answers.append(server.send(PATH, asked)))
            asking.start()
            server.until(lambda: server.service.calls.num_open == 1)
            server.send("/abort_request", {"abort_all": True})
            asking.join(60)
            status, answer = answers[0]
            told = json.dumps(answer) if status == 503 else answer
            assert (status == 503) or (stream and status == 200)
            assert "aborted by /abort_request" in told and "message_stop" not in told


def test_a_stream_that_has_nothing_to_say_for_long_says_so(models, monkeypatch):
    monkeypatch.setattr(anthropic_messages, "PING_S", 0.0)
    with Live(scripted(models[0], CALL)) as server:
        kinds = [event["type"] for event in events(server, PATH, {**ASK, "tools": TOOLS})]
        assert kinds.count("ping") > 20 and kinds[-1] == "message_stop"
        assert assembled(events(server, PATH, {**ASK, "tools": TOOLS}))["content"][0]["input"] == ARGUMENTS


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_leaves_nothing_in_the_engine(server, stream):
    connection = server.connect()
    body = {**ASK, "max_tokens": 450, "ignore_eos": True, "stream": stream}
    connection.request("POST", PATH, json.dumps(body), {"Content-Type": "application/json"})
    server.until(lambda: bool(scheduler_of(server).running))
    if stream:
        connection.getresponse().readline()
    connection.close()
    assert_all_free(server)


def test_counting_ends_where_its_client_goes_away(server, monkeypatch):
    renderer, seen, go = server.service.renderer, [], threading.Event()
    encode = renderer.encode

    def slow(self, text):
        seen.append(len(text))
        go.wait(20)
        return encode(text)

    monkeypatch.setattr(type(renderer), "encode", slow)
    connection = server.connect()
    body = json.dumps({"messages": [{"role": "user", "content": "Ann has 5 apples. " * 1500}]})
    connection.request("POST", COUNT, body, {"Content-Type": "application/json"})
    server.until(lambda: bool(seen))
    connection.close()
    server.do(server.service.calls.abort_all("nothing runs"))  # a turn of the event loop, which sees the client go
    server.until(lambda: not server.service.bodies.num_bytes)
    go.set()
    monkeypatch.undo()
    assert server.send(COUNT, {"messages": USER})[0] == 200
    assert len(seen) <= 2
