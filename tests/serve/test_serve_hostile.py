"""What a hostile or broken client may send: whatever it is, it is refused by name or answered, and nobody else notices."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from pydantic import ValidationError

from tests.serve.serve_setup import assert_all_free, is_idle, live
from whet.data.strict_json import parse_json
from whet.serve import bodies, connection
from whet.serve.access import ADMIN as ADMIN_ROUTES
from whet.serve.access import Keys
from whet.serve.app import CHANGE
from whet.serve.bounds import check_shape, check_size, num_characters
from whet.serve.errors import ApiError
from whet.serve.native import GenerateBody, NativeSampling
from whet.serve.openai_chat import ChatBody
from whet.serve.openai_completions import CompletionBody

API, ADMIN = "an-api-key-of-length", "an-admin-key-of-length"
ASK = {"prompt": "Ann", "max_tokens": 1}
HELLO = [{"role": "user", "content": "Ann"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}

DEEP = json.loads("[" * 150 + "]" * 150)
ODD = [
    -1,
    0,
    1,
    1 << 31,
    -(1 << 31),
    1 << 63,
    1 << 64,
    10**4000,
    -0.0,
    1e-300,
    1e300,
    1.5,
    True,
    "",
    "x",
    "\x00",
    "\u202e\ufeff\x1b[31m",
    "x" * 20_000,
    [],
    {},
    [[]],
    [None],
    [1 << 70],
    [-1],
    [0.5],
    ["a"] * 5000,
    ["x" * 5000],
    [[1], ["a"]],
    {"": ""},
    {"1": 1e300},
    {"-1": 1},
    {str(i): 1.0 for i in range(5000)},
    {"$ref": "#"},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
    {"type": "function", "function": {}},
    {"type": "function", "function": {"name": ["x"]}},
    DEEP,
]
MESSAGES = [
    [{}],
    ["x"],
    [{"role": "user"}],
    [{"role": "x", "content": "y"}],
    [{"role": ["user"], "content": "y"}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "content": None, "tool_calls": 3}],
    [{"role": "tool", "content": "x"}],
    [{"role": "tool", "tool_call_id": {}, "content": "x"}],
    [{"role": "user", "content": "x", "name": {"a": 1}}],
    HELLO * 20_000,
    [{"role": "user", "content": "x" * 100_000}],
]
GRAMMARS = [
    '{"$ref": "#"}',
    "{",
    "(",
    "[^\\s\\S]",
    "root ::= root",
    "root ::= [\\",
    'root ::= "\\x',
    "root ::= " + "(" * 2000,
    "",
    "\x00",
    "[]",
    "start: start",
    "x" * 200_000,
    '{"type": "string", "pattern": "("}',
    '{"properties": {"a": 1}}',
    '{"type": "integer", "minimum": 1e400}',
]
SCHEMAS = [{"$ref": "#"}, {"type": 3}, {"$defs": 3}, {"properties": []}, {"enum": []}, {"minLength": -1, "type": "string"}, {"not": {}}]
TOOLS = [
    [{}],
    ["x"],
    [{"type": "function"}],
    [{"type": "function", "function": {"name": 3}}],
    [{"type": "function", "function": {"name": "a b\n\"", "parameters": {}}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": 3}}}],
    [TOOL] * 600,
    *([{"type": "function", "function": {"name": "f", "parameters": schema}}] for schema in SCHEMAS),
]
FORMATS = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema}} for schema in SCHEMAS] + [{"type": "x"}, {}]
MORE = {"messages": MESSAGES, "tools": TOOLS, "response_format": FORMATS, "json_schema": GRAMMARS, "regex": GRAMMARS, "ebnf": GRAMMARS}
ROUTES = {
    "/v1/chat/completions": (ChatBody, {"messages": HELLO, "max_tokens": 1}, None),
    "/v1/completions": (CompletionBody, ASK, None),
    "/generate": (GenerateBody, {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}, None),
    "sampling_params": (NativeSampling, {"max_new_tokens": 1}, {"input_ids": [5]}),
}
FIELDS = [(route, field) for route, (model, _, _) in ROUTES.items() for field in model.model_fields]


def send(server, path, body):
    try:
        raw = json.dumps(body).encode()
    except (ValueError, RecursionError) as error:
        raise AssertionError(body) from error
    return server.send(path, raw)


def assert_told(status, answer, path=""):
    """Answered, or refused in the one shape of errors."""
    assert status < 500, (status, answer, path)
    if status >= 400:
        error = answer["error"]
        assert error["message"] and error["type"] and set(error) == {"message", "type", "param", "code"}, answer
        assert len(error["message"]) <= 2003


@pytest.fixture(scope="module")
def tried(models):
    """A server whose replies are short whatever is asked for, so that trying takes no time."""
    with live(models[0], engine={"embedded": {"cache_tokens": 64, "block_size": 4}}, limits={"max_samples": 4}) as server:
        yield server


@pytest.mark.parametrize(("route", "field"), FIELDS, ids=[f"{route} {field}" for route, field in FIELDS])
def test_no_value_of_a_field_is_a_fault_of_the_server(tried, route, field):
    _, base, around = ROUTES[route]
    for value in [*ODD, *MORE.get(field, [])]:
        body = {**base, field: value}
        if field in ("text", "input_ids"):
            body = {key: item for key, item in body.items() if key not in ("text", "input_ids") or key == field}
        if field == "tool_choice":
            body["tools"] = [TOOL]
        if field == "tools":
            body["tool_choice"] = "required"
        path = route if around is None else "/generate"
        status, answer = send(tried, path, body if around is None else {**around, route: body})
        assert_told(status, answer if status >= 400 else None, (field, str(value)[:100]))
    assert tried.send("/v1/completions", ASK)[0] == 200


@pytest.mark.parametrize("path", CHANGE)
def test_no_body_of_a_route_of_control_is_a_fault_of_the_server(tried, path):
    fields = ("rid", "abort_all", "mode", "model_path", "weight_version", "keep_pause", "load_format", "token_step", "x")
    for value in [*ODD, "\x00", "x" * 300, "/" * 3000, "/proc/self/fd/0", "\udcff".encode("utf-8", "surrogatepass").decode("latin-1")]:
        for field in fields:
            status, answer = send(tried, path, {"model_path": "nowhere", field: value} if "weights" in path else {field: value})
            assert status < 500, (field, value, answer)
            if status >= 400 and "error" in answer:
                assert_told(status, answer)
    tried.send("/continue_generation", {})
    assert tried.send("/v1/completions", ASK)[0] == 200


def test_field_and_limit_are_named(server):
    for field, value, words in (
        ("stop", ["x"] * 65, "at most 64"),
        ("stop", ["x" * 257], "at most 256"),
        ("stop_token_ids", [1] * 5000, "at most 4096"),
        ("logit_bias", {str(i): 1 for i in range(5000)}, "at most 4096"),
        ("regex", "x" * 140_000, "at most 131072"),
        ("seed", 1 << 64, "less than"),
        ("max_tokens", 1 << 40, "less than"),
        ("temperature", 1e30, "at most 1e+06"),
        ("prompt", ["x"] * 5000, "at most 4096"),
        ("prompt", "x" * 600_000, "over the limit of 32768"),
        ("prompt", DEEP, "deeper than 100"),
    ):
        status, answer = server.send("/v1/completions", {**ASK, field: value})
        assert status == 400 and words in answer["error"]["message"], answer
        assert answer["error"]["param"].startswith(field) and answer["error"]["message"].startswith(field), answer
    status, answer = server.send("/generate", {"text": "x" * 600_000})
    assert status == 400 and answer["error"]["param"] == "text"
    asked = {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 100, "sampling_params": {"n": 128, "max_new_tokens": 500}}
    status, answer = server.send("/generate", asked)
    assert status == 400 and "over the limit of 4194304 log-probs" in answer["error"]["message"]
    large = b"[" + b"{}," * 100_001 + b"1]"
    assert "over 100000 lists and objects" in server.send("/v1/completions", large)[1]["error"]["message"]


def test_braces_in_texts_are_no_structure():
    check_size(json.dumps({"prompt": '{[,"\\' * 200_000}).encode())
    for raw in (b"[" * 100_001, b'"x"' + b"[" * 100_001, b'"\\"' * 3 + b"{" * 100_001):
        if raw.startswith(b'"\\"'):
            raw = b'"\\""' + b"{" * 100_001
        with pytest.raises(ApiError, match="over 100000 lists and objects"):
            check_size(raw)
    check_size(b'"' + b'\\"' * 500_000 + b"[" * 200_000)  # a text without an end is looked at once
    check_shape({"a": json.loads("[" * 100 + "]" * 100)})
    with pytest.raises(ApiError, match="a: lists and objects are nested deeper than 100"):
        check_shape({"b": 1, "a": json.loads("[" * 101 + "]" * 101)})
    assert num_characters({"a": ["xy", {"b": "z"}], "c": 3}) == 3


def test_keys_that_occur_twice_are_found_in_linear_time():
    class Key(str):
        compared = 0

        def __eq__(self, other):
            Key.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    from whet.data.strict_json import _object

    with pytest.raises(ValueError, match="the key 'k9999' occurs 2 times"):
        _object([*((Key(f"k{i}"), 1) for i in range(10_000)), (Key("k9999"), 2)])
    assert Key.compared < 100_000
    with pytest.raises(ValueError, match="occurs 20000 times"):
        parse_json("{" + ",".join('"x": 1' for _ in range(20_000)) + "}")


HOSTS = ["[::1", "[", "a:b:c", "a:99999999", "[x]", "\x80\xff", "::::", "a@b", "%00", "localhost:x"]


@pytest.mark.parametrize("keys", [Keys(), Keys(API)], ids=["open", "keyed"])
def test_malformed_headers_are_refused_as_all_else(models, keys):
    with live(models[0], keys) as server:
        for path in ("/health", "/v1/models", "/v1/models/", "/health/", "/nowhere", "/v1/models/%00%ff", "//", "/%2e%2e/x"):
            for name in ("Host", "Origin"):
                for value in HOSTS:
                    heads = {"Host": "localhost", name: value}
                    lines = [f"GET {path} HTTP/1.1", *(f"{key}: {item}" for key, item in heads.items()), "Connection: close", "", ""]
                    answer = raw(server, "\r\n".join(lines).encode("latin-1"))
                    status = int(answer.split(b" ", 2)[1])
                    assert status < 500, answer
                    if status >= 400:
                        assert_told(status, json.loads(answer.partition(b"\r\n\r\n")[2]))


def raw(server, data, *, ends=False):
    """What comes back for bytes, until the server closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as link:
        link.sendall(data)
        if ends:
            link.shutdown(socket.SHUT_WR)
        out = b""
        try:
            while more := link.recv(65536):
                out += more
        except ConnectionResetError:
            pass
        return out


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_no_http_is_told_so(server, data):
    answer = raw(server, data, ends=True)
    assert answer.startswith(b"HTTP/1.1 4"), answer
    assert b'"error":' in answer.replace(b" ", b"")


def test_garbage_in_the_midst_of_an_answer_ends_its_connection_alone(server):
    head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Type: application/json\r\n\r\n"
    body = b'{"input_ids": [5], "stream": true, "sampling_params": {"max_new_tokens": 200}}'
    raw(server, head + b"%x\r\n%s\r\n" % (len(body), body) + b"no length\r\n")
    assert_all_free(server)


def test_a_websocket_is_not_spoken(server):
    wants = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    answer = raw(server, b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n" + wants, ends=True)
    assert answer.startswith(b"HTTP/1.1 404 ")


@pytest.mark.parametrize("head", [b"", b"GET /health HTTP/1.1\r\nHost:", b"POST /generate HTTP/1.1\r\nHost: localhost\r\nX: y\r\n"])
def test_a_head_that_never_ends_is_not_waited_for(models, head, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    with live(models[0], Keys(API)) as server:
        assert raw(server, head) == b""
        first = raw_twice(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /health HT")
        assert first.count(b"HTTP/1.1 200") == 1


def raw_twice(server, first, second):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 20) as link:
        link.sendall(first)
        out = link.recv(65536)
        link.sendall(second)
        try:
            while more := link.recv(65536):
                out += more
        except ConnectionResetError:
            pass
        return out


def test_a_body_that_never_ends_is_not_waited_for_and_its_connection_ends(models, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_TIMEOUT_S", 0.3)
    with live(models[0]) as server:
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        answer = raw(server, head)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"did not arrive within 0.3 s" in answer
        assert server.service.bodies.num_bytes == 0


@pytest.mark.parametrize("path", ["/generate", "/health", "/v1/models", "/nowhere", "/update_weights_from_disk"])
def test_nothing_of_a_body_is_read_before_the_key_is_asked_for_and_none_where_there_should_be_none(models, monkeypatch, path):
    def read(raw):
        raise AssertionError("a body was read")

    monkeypatch.setattr(bodies, "_parsed", read)
    with live(models[0], Keys(API)) as server:
        for method in ("GET", "POST"):
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100000000\r\n\r\n{{"
            answer = raw(server, head.encode())  # ends, though the body does not
            status = int(answer.split(b" ", 2)[1])
            assert status in (200, 401, 404, 405) and b"connection: close" in answer, answer


def test_there_are_so_many_connections_and_no_more(models, monkeypatch):
    monkeypatch.setattr("whet.serve.server.num_connections", lambda limits: 3)
    with live(models[0]) as server:
        host, port = server.url.removeprefix("http://").split(":")
        held = [socket.create_connection((host, int(port)), 20) for _ in range(3)]
        answer = raw(server, b"")
        assert answer.startswith(b"HTTP/1.1 503 ") and b"3 connections are open" in answer
        for link in held:
            link.close()

        def free():
            return raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")

        server.until(free)


def test_bodies_together_are_bounded(models):
    with live(models[0], limits={"max_body_bytes": 2048}) as server:
        server.service.bodies.num_bytes = 2048 * bodies.MAX_BODIES
        status, answer = server.send("/v1/completions", ASK)
        assert status == 503 and answer["error"]["code"] == "server_full"
        server.service.bodies.num_bytes = 0
        assert server.send("/v1/completions", ASK)[0] == 200 and server.service.bodies.num_bytes == 0


def test_a_client_that_goes_away_ends_what_is_done_with_its_text(server, monkeypatch):
    renderer, pieces, go = server.service.renderer, [], threading.Event()
    encode = renderer.encode

    def slow(text):
        pieces.append(len(text))
        assert go.wait(20)
        return encode(text)[:10]

    monkeypatch.setattr(type(renderer), "encode", lambda self, text: slow(text))
    connection = server.connect()
    body = {"text": "x" * 30_000}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    server.until(lambda: bool(pieces))
    connection.close()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.2), server.loop).result(20)
    go.set()
    server.until(lambda: is_idle(server))
    monkeypatch.undo()
    assert server.send("/v1/completions", ASK)[0] == 200, "the one thread is free"
    assert len(pieces) == 1


def test_a_text_that_is_far_too_long_is_counted_no_further(server, monkeypatch):
    renderer, seen = server.service.renderer, []
    encode = renderer.encode
    monkeypatch.setattr(type(renderer), "encode", lambda self, text: (seen.append(len(text)), encode(text))[1])
    status, answer = server.send("/v1/completions", {"prompt": "Ann has 5 apples. " * 1500})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert sum(seen) < 10_000
    seen.clear()
    messages = [{"role": "user", "content": "Ann has 5 apples. " * 1500}]
    assert server.send("/v1/chat/completions", {"messages": messages})[1]["error"]["param"] == "messages"
    assert sum(seen) < 10_000


LONG = "Ann has 5 apples. " * 1500
LONGER = "x" * 40_000
CALLED = {"role": "tool", "content": "7"}


def calling(name, arguments):
    return [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}, CALLED]


@pytest.mark.parametrize("place", ["arguments", "name", "thinking", "tools", "keys", "tool keys"])
@pytest.mark.parametrize("text", [LONG, LONGER], ids=["counted", "refused at once"])
def test_all_that_messages_and_tools_say_is_counted(server, monkeypatch, place, text):
    text = LONGER if place.endswith("keys") else text  # what templates make of keys is not counted
    asked = {
        "arguments": {"messages": calling("add", {"a": [text]})},
        "keys": {"messages": calling("add", {text: 1})},
        "name": {"messages": calling(text, {})},
        "thinking": {"messages": [*HELLO, {"role": "assistant", "content": "7", "reasoning_content": text}, *HELLO]},
        "tools": {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "add", "description": text}}]},
        "tool keys": {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "add", "parameters": {text: 1}}}]},
    }[place]

    def render(*args):
        raise AssertionError("it was rendered")

    monkeypatch.setattr(type(server.service.renderer), "prompt", render)
    status, answer = server.send("/v1/chat/completions", asked)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
    assert answer["error"]["param"] == ("tools" if place.startswith("tool") and text is LONGER else "messages")


def test_looks_at_the_engines_health_are_one_request(server, monkeypatch):
    engine, asked, go = server.service.engine, [], threading.Event()
    generate = engine.generate

    async def slow(request):
        asked.append(request.id)
        await asyncio.to_thread(go.wait, 20)
        async for chunk in generate(request):
            yield chunk

    monkeypatch.setattr(engine, "generate", slow)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.get, "/health_generate") for _ in range(8)]
        server.until(lambda: bool(asked))
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.2), server.loop).result(20)
        go.set()
        assert {answer.result(20)[0] for answer in answers} == {200}
    assert len(asked) == 1
    assert server.get("/health_generate")[0] == 200 and len(asked) == 2


def test_a_grammar_that_nothing_can_have_ends_nobody_elses_request(server):
    asked = {"input_ids": [5, 6], "stream": True, "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    with server.stream("/generate", asked) as events:
        next(events)
        for form in ({"json_schema": '{"$ref": "#"}'}, {"regex": "a[^\\s\\S]"}, {"ebnf": "root ::= root"}):
            status, answer = server.send("/generate", {"input_ids": [5], "sampling_params": form})
            assert status == 400 and answer["error"]["param"], answer
        assert list(events)[-1]["meta_info"]["completion_tokens"] == 300


def test_samples_of_one_request_keep_their_ids_from_anothers(server):
    asked = {"input_ids": [5], "rid": "a", "stream": True, "sampling_params": {"n": 2, "max_new_tokens": 300, "ignore_eos": True}}
    with server.stream("/generate", asked) as events:
        next(events)
        status, answer = server.send("/generate", {"input_ids": [5], "rid": "a_1", "sampling_params": {"max_new_tokens": 1}})
        assert status == 400 and answer["error"]["param"] == "rid", answer
        server.send("/abort_request", {"rid": "a"})
        list(events)


def test_a_stream_tells_a_reply_in_bytes_that_grow_with_its_length(server):
    asked = {"input_ids": [5, 6], "return_logprob": True, "stream": True, "sampling_params": {"sampling_seed": 3, "ignore_eos": True}}

    def told(num, **more):
        params = {**asked["sampling_params"], "max_new_tokens": num}
        with server.stream("/generate", {**asked, "sampling_params": params, **more}) as events:
            seen = list(events)
        return seen, sum(len(event["output_ids"]) for event in seen)

    short, long = told(200)[1], told(400)[1]
    assert long < 3 * short and long < 400 * 40, "it repeats everything, the more seldom the longer it is"
    seen, params = told(400)[0], {**asked["sampling_params"], "max_new_tokens": 400}
    whole = server.generate(**{**asked, "stream": False, "sampling_params": params})
    assert all(later["output_ids"][: len(early["output_ids"])] == early["output_ids"] for early, later in pairwise(seen))
    assert seen[-1]["output_ids"] == whole["output_ids"] and seen[-1]["text"] == whole["text"]

    parts, num = told(400, incremental_streaming_output=True)
    assert num == 400 and [token for part in parts for token in part["output_ids"]] == whole["output_ids"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    entries = [entry for part in parts for entry in part["meta_info"]["output_token_logprobs"]]
    assert entries == whole["meta_info"]["output_token_logprobs"]
    assert [part["meta_info"]["completion_tokens"] for part in parts][-1] == 400


def test_a_path_that_is_not_to_the_letter_a_route_of_control_reaches_none(models):
    assert set(CHANGE) == ADMIN_ROUTES
    with live(models[0], Keys(API, ADMIN)) as server:
        for path in CHANGE:
            for end in ("%0A", "%0a", "/", "%00", "%2F", ";x", "%20", "%0D%0A", "?x=%0A"):
                for method in ("POST", "GET"):
                    status, answer = server.send(path + end, {}, method, Authorization=f"Bearer {API}")
                    assert status in (401, 404, 405), (path + end, answer)


WRONG = '"",' * 200_000
MANY = ",".join(f'"k{i}":0' for i in range(200_000))


@pytest.mark.parametrize(
    ("model", "raw"),
    [
        (CompletionBody, f'{{"prompt": [{WRONG}""]}}'),
        (CompletionBody, f'{{"prompt": [{"[0.5]," * 90_000}[0.5]]}}'),
        (CompletionBody, f'{{"prompt": "x", "stop_token_ids": [{WRONG}""]}}'),
        (CompletionBody, f'{{"prompt": "x", {MANY}}}'),
        (CompletionBody, f'{{"prompt": "x", "logit_bias": {{{MANY}}}}}'),
        (CompletionBody, f'{{"prompt": "x", "stream_options": {{{MANY}}}}}'),
        (GenerateBody, f'{{"input_ids": [{WRONG}""]}}'),
        (GenerateBody, f'{{"input_ids": [{"[0.5]," * 90_000}[0.5]]}}'),
        (GenerateBody, f'{{"input_ids": [1], "sampling_params": {{{MANY}}}}}'),
        (ChatBody, f'{{"messages": [{WRONG}""]}}'),
        (ChatBody, f'{{"messages": [{{"role": "user", {MANY}}}]}}'),
    ],
)
def test_a_body_that_is_wrong_in_many_places_is_not_looked_at_in_all_of_them(model, raw):
    """Each error takes a kilobyte and microseconds, on the thread that serves everybody."""
    with pytest.raises((ApiError, ValidationError)) as refused:
        model.model_validate(bodies._parsed(raw.encode()))
    if isinstance(refused.value, ValidationError):
        assert refused.value.error_count() <= 20_000
