"""OpenEnv's WebSocket messages, from a server that speaks them as version 0.10 does."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from tests.rollout.scripted import run
from whet.data.parsers import Malformed, Parsed
from whet.env.adapters.openenv import OpenEnvFailed
from whet.env.build import EnvConfig, build_env_factory
from whet.types import Message, Task, ToolCall

TASK = Task("t", (Message("user", "Guess."),), None, {"seed": 3})
META = {"type": "object"}
GUESS = {"properties": {"metadata": META, "guess": {"type": "integer"}}, "required": ["guess"], "type": "object"}
WORD = {"properties": {"metadata": META, "word": {"type": "string"}}, "required": ["word"], "type": "object"}


class Server:
    """Guess 7. It has so many places."""

    def __init__(self, places=1, action=GUESS):
        self.places, self.action, self.resets, self.ends, self.refused = places, action, [], [], asyncio.Event()

    @asynccontextmanager
    async def running(self):
        app = web.Application()
        app.add_routes([web.get("/schema", self.schema), web.get("/ws", self.session)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # pyright: ignore
        finally:
            await runner.cleanup()

    async def schema(self, request):
        return web.json_response({"action": self.action, "observation": {}, "state": {}})

    async def session(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.places == 0:
            self.refused.set()
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.places -= 1
        try:
            async for message in socket:
                assert message.type is WSMsgType.TEXT
                asked = json.loads(message.data)
                if asked["type"] == "close":
                    self.ends.append("close")
                    break
                await self.answer(socket, asked)
        finally:
            self.places += 1
        return socket

    async def answer(self, socket, asked):
        data = asked["data"]
        if asked["type"] == "reset":
            self.resets.append(data)
            return await self.observe(socket, "Guess a number.", None)
        guess = data.get("guess", data.get("word"))
        if guess == 13:
            return await socket.close()
        if guess == 14:
            return await socket.send_json({"type": "nothing"})
        if guess in ("x", 15):
            code = "VALIDATION_ERROR" if guess == "x" else "EXECUTION_ERROR"
            errors = [{"loc": ["guess"], "msg": "Input should be a valid integer"}] if guess == "x" else []
            return await socket.send_json({"type": "error", "data": {"message": "it broke", "code": code, "errors": errors}})
        await self.observe(socket, "right" if guess in (7, "seven") else "wrong", guess in (7, "seven"))

    async def observe(self, socket, text, won):
        observation: dict[str, Any] = {"text": text, "metadata": {"place": 1} if won else {}}
        await socket.send_json({"type": "observation", "data": {"observation": observation, "reward": won, "done": bool(won)}})


def act(*guesses):
    return Parsed(Message("assistant", "", tuple(ToolCall("act", {"guess": guess}, str(i)) for i, guess in enumerate(guesses))))


async def opened(url, **options):
    return build_env_factory(EnvConfig(name="openenv", options={"url": url, **options}))()


def test_an_action_is_a_call_with_the_server_s_schema():
    async def main():
        server = Server()
        async with server.running() as url:
            env = await opened(url, reset={"level": 2})
            first = await env.start(TASK)
            (tool,) = env.tools
            both = await env.step(act(3, "x"))
            wrong = await env.step(Parsed(Message("assistant", "", (ToolCall("jump", {}, "a"),)), (Malformed("no JSON", 1),)))
            last = await env.step(act(4, 7, 8))
            await env.close()
            return server, first, tool["function"], both, wrong, last

    server, first, tool, both, wrong, last = run(main())
    assert first.prompt[0].content == "Guess.\n\nGuess a number." and server.resets == [{"seed": 3, "level": 2, "episode_id": "t"}]
    assert tool["name"] == "act" and tool["parameters"]["properties"] == {"guess": {"type": "integer"}}
    assert [message.content for message in both.messages] == ["wrong", "Error: guess: Input should be a valid integer"]
    assert both.reward == 0.0 and both.counts["tool_errors"] == 1
    assert [message.content for message in wrong.messages] == ["Error: there is no tool 'jump'; the tool is act", "Error: no JSON"]
    assert (last.done, last.reward, last.notes[0].attachments) == (True, 1.0, {"metadata": {"place": 1}}), "nothing is played after the end"
    assert server.ends == ["close"]


def test_a_reply_is_the_action_where_it_is_a_text():
    async def main():
        async with Server(action=WORD).running() as url:
            env = await opened(url)
            await env.start(TASK)
            steps = [await env.step(Parsed(Message("assistant", word))) for word in ("one", "x", "seven")]
            await env.close()
            return env.tools, steps

    tools, (step, refused, last) = run(main())
    assert tools == () and step.messages == (Message("user", "wrong"),) and step.reward == 0.0
    assert refused.messages[0].content.startswith("Error: guess: Input") and refused.counts == {"illegal_actions": 1}
    assert last.done and last.reward == 1.0


def test_a_server_that_is_full_is_waited_for_and_the_wait_can_be_ended():
    async def main():
        server = Server(places=1)
        async with server.running() as url:
            first, second, third = [await opened(url) for _ in range(3)]
            await first.start(TASK)
            waiting = asyncio.create_task(second.start(TASK))
            await server.refused.wait()
            assert not waiting.done()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await third.start(TASK)
            await third.close()
            await first.close()
            assert (await waiting).prompt[0].content.endswith("Guess a number.")
            await second.close()

    run(main())


@pytest.mark.parametrize(
    ("guess", "words"),
    [
        (13, r"closed the session in step \(WebSocket CLOSE, code 1000\)"),
        (14, "answered step with .* which is no observation"),
        (15, "reports EXECUTION_ERROR: it broke"),
    ],
)
def test_what_is_not_the_model_s_fault_is_an_error_of_the_environment(guess, words):
    async def main():
        async with Server().running() as url:
            env = await opened(url)
            await env.start(TASK)
            try:
                await env.step(act(guess))
            finally:
                await env.close()

    with pytest.raises(OpenEnvFailed, match=words):
        run(main())


def test_settings_that_cannot_be_are_refused():
    for options, words in (({"url": "localhost:8000"}, "begins with http"), ({"url": "http://x", "action": "move"}, "auto, tool or text")):
        with pytest.raises(ValueError, match=words):
            build_env_factory(EnvConfig(name="openenv", options=options))()
