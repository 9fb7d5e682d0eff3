"""A user whom a model plays: the policy, which does not train on it, or a server that fails, hangs and talks nonsense."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.fakes import FakeEngine
from tests.rollout.scripted import CALL, RENDERER, STOP, opens, run, says, turns
from whet.config import ConfigError
from whet.env.build import EnvConfig, build_env_factory
from whet.env.deadline import Deadline
from whet.env.limits import Limits
from whet.env.resources import Resources
from whet.env.rollout import TrajectoryRun
from whet.types import Message, Origin, Outcome, SamplingParams, Task

TASK = Task("t", (Message("system", "is"), Message("user", "12*3?")), "36", {"wish": "36"}, origin="rows.jsonl:3")
PLAN = "You want {wish}."


def config(tools=(), **options):
    options = {"instructions": PLAN, **options}
    return EnvConfig.model_validate({"name": "simulated_user", "tools": list(tools), "options": options, "max_reply_chars": 100})


def played(env, *replies, task=TASK, timeout_s=None, limits=None):
    engine = FakeEngine(turns(*(says(reply) for reply in replies)))

    async def main():
        factory = build_env_factory(env)
        resources = Resources()
        deadline = Deadline.after(timeout_s)
        params = SamplingParams(999, stop_token_ids=(STOP,))
        made = TrajectoryRun("t/0", task, engine, RENDERER, params, limits or Limits(9, 2000, 300), deadline=deadline)
        try:
            return await made.to_end(opens(factory(**await resources.open(factory.needs))))
        finally:
            await resources.aclose()

    found = run(main())
    engine.check_idle()
    return found, engine


def text(tokens):
    return RENDERER.decode(tuple(tokens))


def test_the_policy_plays_the_user_and_trains_on_the_assistant_alone():
    found, engine = played(config(stop=["is"]), "3", "12", "36", "is")
    assert (found.outcome, found.stop) == (Outcome.COMPLETED, "user_stopped")
    assert [turn.message.content for turn in found.turns] == ["3", "36"] and not any(turn.restart for turn in found.turns)
    assert set(found.turns[1].context_origin) == {Origin.ENVIRONMENT} and "user\n12<" in text(found.turns[1].context)
    assert [turn.notes[0].attachments for turn in found.turns] == [{"user": "12"}, {"user": "is"}]
    users = [text(request.tokens) for request in engine.requests[1::2]]
    assert "You want 36." in users[0] and "assistant\n12*3?" in users[0] and "user\n3<" in users[0]
    assert users[1].startswith(users[0]) and "user\n36<" in users[1]


def test_the_user_may_speak_first():
    found, engine = played(config(opening="user", max_exchanges=1), "12", "36")
    assert (found.outcome, found.stop) == (Outcome.COMPLETED, "max_exchanges")
    assert "user\nBegin.<" in text(engine.requests[0].tokens) and "12*3?" not in text(engine.requests[0].tokens)
    assert "system\nis" in text(found.turns[0].context) and "user\n12<" in text(found.turns[0].context)
    assert found.counts["exchanges"] == 1


def test_the_assistant_has_its_tools_and_the_user_hears_its_answer():
    found, engine = played(config(tools=["calculator"], max_exchanges=2), CALL, "36", "12", "3")
    assert found.outcome is Outcome.COMPLETED and found.counts["tool_calls"] == 1
    assert [turn.message.content for turn in found.turns] == ["", "36", "3"]
    assert "<tool_response>\n36" in text(found.turns[1].context) and "calculator" in text(found.turns[0].context)
    assert "tool_response" not in text(engine.requests[2].tokens) and "user\n36<" in text(engine.requests[2].tokens)


def test_no_room_is_truncated():
    found, _ = played(config(), "3", "12", limits=Limits(1, 2000, 300))
    assert found.outcome is Outcome.TRUNCATED and len(found.turns) == 1


def test_instructions_that_a_row_cannot_fill_name_the_row():
    found, _ = played(config(instructions="You want {wishes}."))
    assert found.outcome is Outcome.ENV_ERROR and "'wishes'" in found.error.message and "rows.jsonl:3" in found.error.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instructions": " "}, "is empty"),
        ({"opening": "both"}, "prompt or user"),
        ({"stop": "DONE"}, "list of phrases"),
        ({"max_exchanges": 0}, "at least 1"),
        ({"server": {"address": "http://x"}}, "address"),
        ({"server": {"url": "x"}}, "write http://"),
        ({"server": {"url": "http://x", "api_key_env": "NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
        ({"instructions": "{wish"}, "env.options"),
        ({"rounds": 3}, "rounds"),
    ],
)
def test_options_that_make_no_sense_are_told_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        build_env_factory(config(**options))


@contextmanager
def server(*answers):
    """A server that answers so, one after another: a text, a status, bytes, or an event that it waits for."""
    asked, left = [], list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((body, self.headers.get("Authorization")))
            answer = left.pop(0)
            if isinstance(answer, threading.Event):
                answer.wait(20)
                return
            data = answer if isinstance(answer, bytes) else json.dumps({"choices": [{"message": {"content": answer}}]}).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{made.server_port}/v1/chat/completions", asked
    finally:
        for answer in answers:
            if isinstance(answer, threading.Event):
                answer.set()
        made.shutdown()
        thread.join()
        made.server_close()


def test_a_server_plays_the_user_with_a_key_and_what_fails_is_asked_again(monkeypatch):
    monkeypatch.setenv("USERS_KEY", "secret")
    with server(500, b"garbage", "12", "12 [DONE]") as (url, asked):
        options = {"url": url, "model": "someone", "api_key_env": "USERS_KEY", "backoff_s": 0.0, "max_tokens": 9}
        found, _ = played(config(server=options), "3", "36")
    assert (found.outcome, found.stop) == (Outcome.COMPLETED, "user_stopped")
    assert [turn.message.content for turn in found.turns] == ["3", "36"]
    body, key = asked[2]
    assert key == "Bearer secret" and (body["model"], body["max_tokens"]) == ("someone", 9)
    assert [(message["role"], message["content"]) for message in asked[3][0]["messages"]] == [
        ("system", "You want 36."), ("user", "Begin."), ("assistant", "12*3?"), ("user", "3"), ("assistant", "12"), ("user", "36"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "outcome", "kind"), [((500, 500), Outcome.ENV_ERROR, "RequestFailed"), ((401,), Outcome.ENV_ERROR, "RequestFailed")]
)
def test_a_server_that_fails_for_good_is_an_error_of_the_environment(answers, outcome, kind):
    with server(*answers) as (url, asked):
        found, _ = played(config(server={"url": url, "attempts": 2, "backoff_s": 0.0}), "3")
    assert (found.outcome, found.error.kind, found.error.where) == (outcome, kind, "env.step") and len(asked) == len(answers)
    assert [turn.message.content for turn in found.turns] == ["3"]


@pytest.mark.parametrize(("own_s", "trajectory_s", "kind"), [(0.1, None, "RequestLate"), (20, 0.3, "TimeoutError")])
def test_a_server_that_hangs_is_a_timeout_by_its_own_deadline_or_the_trajectorys(own_s, trajectory_s, kind):
    with server(threading.Event()) as (url, _):
        found, _ = played(config(server={"url": url, "attempts": 1, "timeout_s": own_s}), "3", timeout_s=trajectory_s)
    assert (found.outcome, found.error.kind, found.error.where) == (Outcome.TIMEOUT, kind, "env.step")
