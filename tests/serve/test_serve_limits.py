"""What clients must not be able to do, and what is left of those that go away."""

import json
import socket
import struct
import threading
import time
from http.client import HTTPConnection

import pytest

from tests.serve.serve_setup import assert_all_free, is_idle, live, scheduler_of
from whet.serve import endpoint
from whet.serve.access import ADMIN as CONTROL
from whet.serve.access import Keys, check_exposure, is_loopback
from whet.serve.app import CHANGE

API, ADMIN = "an-api-key-of-length", "an-admin-key-of-length"
LONG = {"max_new_tokens": 400, "ignore_eos": True}
ASK = {"prompt": "Ann", "max_tokens": 1}


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def hang_up(connection):
    """With a reset, as a process that is killed does."""
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sock.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reset", [True, False])
def test_a_client_that_goes_away_leaves_nothing_in_the_engine(server, stream, reset):
    connection = server.connect()
    body = {"input_ids": [5, 6, 7], "stream": stream, "sampling_params": {**LONG, "n": 3}}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    server.until(lambda: len(scheduler_of(server).running) == 3)
    if stream:
        connection.getresponse().readline()
    hang_up(connection) if reset else connection.sock.shutdown(socket.SHUT_RDWR)
    began = time.monotonic()
    assert_all_free(server)
    assert time.monotonic() - began < 20
    connection.close()


def test_a_client_that_goes_away_while_paused_is_noticed(server):
    server.send("/pause_generation", {})
    connection = server.connect()
    connection.request("POST", "/generate", b'{"input_ids": [5], "stream": true}', {"Content-Type": "application/json"})
    server.until(lambda: server.service.calls.num_open == 1)
    hang_up(connection)
    server.until(lambda: is_idle(server))


def test_a_client_that_reads_no_further_keeps_nobody_waiting(server, monkeypatch):
    monkeypatch.setattr(endpoint, "SEND_TIMEOUT_S", 0.3)
    connection = HTTPConnection(server.url.removeprefix("http://"))
    connection.connect()
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    params = {**LONG, "n": 16}
    body = {"input_ids": [5, 6, 7], "stream": True, "return_logprob": True, "top_logprobs_num": 20, "sampling_params": params}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    server.until(lambda: server.service.calls.num_open == 1)
    assert_all_free(server)
    connection.close()


def test_a_body_over_the_limit_is_refused_whether_or_not_it_says_so(models):
    with live(models[0], limits={"max_body_bytes": 2048}) as server:
        large = json.dumps({"prompt": "x" * 4096}).encode()
        assert server.send("/v1/completions", large)[0] == 413
        connection = server.connect()
        connection.request("POST", "/v1/completions", iter([large[:2000], large[2000:]]), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 413 and "2048 bytes" in json.load(answer)["error"]["message"]
        connection.close()
        assert server.send("/v1/completions", ASK)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1]",
        b'"x"',
        b"\xff\xfe",
        b'{"a": NaN}',
        b'{"prompt": 1, "prompt": 2}',
        b"[" * 100_000,
        b'{"a": 1e999}',
        b'{"prompt": "\\ud800"}',
    ],
)
def test_what_is_no_json_object_is_refused(server, body):
    for path in ("/v1/chat/completions", "/v1/completions", "/generate", "/abort_request"):
        status, answer = server.send(path, body)
        assert status == 400 and answer["error"]["message"], body


def test_other_content_types_paths_and_methods_are_refused_in_the_same_shape(server):
    assert server.send("/generate", b"{}", Content_Type="text/plain")[0] == 415
    assert server.send("/v1/nothing", {})[0] == 404
    status, answer = server.get("/generate")
    assert status == 405 and answer["error"]["type"] == "invalid_request_error"


def test_keys(models):
    with live(models[0], Keys(API, ADMIN)) as server:
        for headers in (
            {},
            bearer("wrong"),
            bearer(API[:-1]),
            bearer(API + "x"),
            bearer("é" * 20),
            {"Authorization": API},
            {"Authorization": "Bearer"},
        ):
            status, answer = server.send("/v1/completions", ASK, **headers)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
            assert API not in json.dumps(answer)
            assert server.get("/v1/models", **headers)[0] == server.get("/server_info", **headers)[0] == 401
        for headers in (bearer(API), {"Authorization": f"bearer {API}"}, {"X_API_Key": API}, bearer(ADMIN)):
            assert server.send("/v1/completions", ASK, **headers)[0] == 200
        assert server.get("/health")[0] == 200
        for path in ("/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/update_weights_from_disk"):
            assert server.send(path, {}, **bearer(API))[0] == 401
        assert server.send("/flush_cache", {}, **bearer(ADMIN))[0] == 200


def test_every_route_that_changes_something_is_one_of_control():
    assert set(CHANGE) <= CONTROL


def test_beyond_this_machine_control_needs_a_key_of_its_own(models):
    with live(models[0], Keys(API), host="0.0.0.0") as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert server.send("/v1/completions", ASK, **bearer(API))[0] == 200
        status, answer = server.send("/update_weights_from_disk", {"model_path": "x"}, **bearer(API))
        assert status == 403 and "WHET_ADMIN_KEY" in answer["error"]["message"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", ""])
def test_nothing_is_opened_to_others_without_a_key(host):
    with pytest.raises(ValueError, match="WHET_API_KEY"):
        check_exposure(host, Keys(admin=ADMIN))
    check_exposure(host, Keys(API))


def test_what_is_this_machine():
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("127.8.8.8") and is_loopback("localhost")
    check_exposure("localhost", Keys())
    with pytest.raises(ValueError, match="no name that this machine knows"):
        is_loopback("no such host.invalid")


@pytest.mark.parametrize("key", ["short", "with a space in the key", "ünïcode-key-that-is-long"])
def test_keys_that_cannot_serve_are_refused(key):
    with pytest.raises(ValueError, match="WHET_ADMIN_KEY must be 16 or more"):
        Keys.from_environment({"WHET_API_KEY": API, "WHET_ADMIN_KEY": key})
    assert API not in repr(Keys(API))


def test_web_pages_cannot_use_a_server_without_a_key(server):
    for headers in (
        {"Origin": "https://evil.example"},
        {"Host": "evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Origin": "null"},
        {"Host": ""},
    ):
        assert server.get("/v1/models", **headers)[0] == 403
    for headers in ({"Origin": "http://localhost:3000"}, {"Host": "localhost"}, {"Host": "[::1]:8000"}, {"Sec_Fetch_Site": "same-origin"}):
        assert server.get("/v1/models", **headers)[0] == 200


def test_too_many_wait_their_turn_and_more_are_told_to_come_back(models):
    with live(models[0], limits={"max_running": 2, "max_waiting": 1}) as server:
        with server.stream("/generate", {"input_ids": [5], "stream": True, "rid": "a", "sampling_params": {**LONG, "n": 2}}) as events:
            next(events)
            waits = []
            thread = threading.Thread(target=lambda: waits.append(server.send("/v1/completions", ASK)), daemon=True)
            thread.start()
            server.until(lambda: server.service.gate.num_waiting == 1)
            connection = server.connect()
            connection.request("POST", "/v1/completions", json.dumps(ASK), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 429 and answer.headers["retry-after"] == "1" and json.load(answer)["error"]["code"] == "server_full"
            connection.close()
            server.send("/abort_request", {"rid": "a"})
            list(events)
        thread.join(30)
        assert waits[0][0] == 200
        assert server.send("/generate", {"input_ids": [5], "sampling_params": {"n": 3}})[0] == 400


def test_a_request_that_takes_too_long_is_ended_with_what_it_has(models):
    with live(models[0], limits={"timeout_s": 0.5}) as server:
        server.send("/pause_generation", {"mode": "in_place"})
        answer = server.generate(input_ids=[5], sampling_params=LONG)
        assert answer["meta_info"]["finish_reason"] == {"type": "abort", "message": "it took longer than 0.5 s (limits.timeout_s)"}
        status, chat = server.send("/v1/completions", ASK)
        assert status == 200 and chat["choices"][0]["finish_reason"] == "abort"
        server.send("/continue_generation", {})
        assert server.send("/v1/completions", ASK)[0] == 200


def test_an_engine_that_fails_is_said_to(models):
    with live(models[0]) as server:

        def fail():
            raise RuntimeError("out of luck")

        core = server.service.engine.core
        core.step, step = fail, core.step
        status, answer = server.send("/v1/completions", ASK)
        assert status == 503 and "out of luck" in answer["error"]["message"]
        assert server.get("/health_generate")[0] == 503
        core.step = step
        assert server.send("/v1/completions", ASK)[0] == 200
        assert_all_free(server)
