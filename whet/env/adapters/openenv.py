"""Environments behind an OpenEnv server, by its WebSocket messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from whet.data.parsers import Parsed
from whet.env.adapters.games import seed_of, with_text
from whet.env.base import Step
from whet.env.tool_env import shorten
from whet.types import JSON, Message, Task, ToolCall, TurnNote

ACT = "act"
"""Name of the tool that takes an action."""
MAX_MESSAGE_BYTES = 16 << 20
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 2.0
"""Between two tries to get a place on a server that is full."""
META = "metadata"
"""Field of actions and observations that is not for the model."""


class OpenEnvFailed(Exception):
    """The server broke the protocol, or reports an error that is not the model's."""


class _Refused(Exception):
    """An error that the server reports."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.text = code, text


@dataclass(frozen=True, slots=True)
class _Seen:
    """The server's answer to `reset` and to `step`."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool

    @property
    def text(self) -> str:
        """The observation's only text, or all of it as JSON."""
        shown = {name: value for name, value in self.observation.items() if name != META}
        texts = [value for value in shown.values() if value not in (None, "", [], {})]
        if len(texts) == 1 and isinstance(texts[0], str):
            return texts[0]
        return json.dumps(shown, ensure_ascii=False)


class OpenEnv:
    """One session with an OpenEnv server: the environment of one trajectory.

    An action is a call of the tool `act`, whose arguments have the server's own schema; where that is a single text, the reply is it.
    A server that is full (CAPACITY_REACHED) is asked again until the trajectory's time is over (rollout.timeout_s).

    Args:
        url: address of the server, such as `http://localhost:8000`.
        action: `tool` or `text`; `auto` chooses by the schema.
        reset: data of every `reset`; the row's metadata and a seed come on top.
        max_reply_chars: longer observations lose their middle.
    """

    def __init__(
        self,
        url: str,
        action: Literal["auto", "tool", "text"] = "auto",
        reset: Mapping[str, JSON] | None = None,
        max_reply_chars: int = 8192,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"the address of an OpenEnv server begins with http:// or https://, not {url!r} (env.options.url)")
        if action not in ("auto", "tool", "text"):
            raise ValueError(f"env.options.action is auto, tool or text, not {action!r}")
        self._url, self._action, self._reset, self._max_chars = url.rstrip("/"), action, dict(reset or {}), max_reply_chars
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._text_field: str | None = None
        self.tools: Sequence[Mapping[str, JSON]] = ()

    async def start(self, task: Task) -> Task:
        self._http = aiohttp.ClientSession()
        self._use_schema(await self._schema())
        seen = await self._first({"seed": seed_of(task), **self._reset, **task.metadata, "episode_id": task.id})
        return with_text(task, shorten(seen.text, self._max_chars))

    async def step(self, reply: Parsed) -> Step:
        if self._text_field is not None:
            return await self._text_step(reply.message.content)
        calls = reply.message.tool_calls
        if not calls and not reply.malformed:
            return Step(done=True)
        counts = {"tool_calls": len(calls), "tool_calls_malformed": len(reply.malformed), "tool_errors": 0}
        answers: list[Message] = []
        rewards: list[float] = []
        notes: list[TurnNote] = []
        for call in calls:  # one after another: each acts on what the one before it left
            seen = await self._called(call)
            if isinstance(seen, str):
                counts["tool_errors"] += 1
                answers.append(self._answer(f"Error: {seen}", call.name, call.id))
                continue
            rewards += [] if seen.reward is None else [seen.reward]
            notes += _notes(seen)
            if seen.done:
                return Step(done=True, reward=_sum(rewards), counts=counts, notes=tuple(notes))
            answers.append(self._answer(seen.text, call.name, call.id))
        for fault in reply.malformed:
            answers.insert(fault.place, self._answer(f"Error: {fault.text}", "error", None))
        return Step(messages=tuple(answers), reward=_sum(rewards), counts=counts, notes=tuple(notes))

    async def close(self) -> None:
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    async def _text_step(self, text: str) -> Step:
        assert self._text_field is not None
        try:
            seen = await self._exchange("step", {self._text_field: text})
        except _Refused as refused:
            return Step(messages=(Message("user", f"Error: {_of_the_model(refused)}"),), counts={"illegal_actions": 1})
        if seen.done:
            return Step(done=True, reward=seen.reward, notes=tuple(_notes(seen)))
        return Step(messages=(Message("user", shorten(seen.text, self._max_chars)),), reward=seen.reward, notes=tuple(_notes(seen)))

    async def _called(self, call: ToolCall) -> _Seen | str:
        """The server's answer to a call; a text: the fault of the call."""
        if call.name != ACT:
            return f"there is no tool {call.name!r}; the tool is {ACT}"
        try:
            return await self._exchange("step", dict(call.arguments))
        except _Refused as refused:
            return _of_the_model(refused)

    def _answer(self, text: str, name: str, call_id: str | None) -> Message:
        return Message("tool", shorten(text, self._max_chars), name=name, tool_call_id=call_id)

    async def _schema(self) -> Mapping[str, Any]:
        assert self._http is not None
        async with self._http.get(f"{self._url}/schema", allow_redirects=False) as answer:
            if answer.status != 200:
                raise OpenEnvFailed(f"{self._url}/schema answers with status {answer.status}; is it an OpenEnv server?")
            return json.loads(await answer.content.read(MAX_MESSAGE_BYTES))["action"]

    def _use_schema(self, schema: Mapping[str, Any]) -> None:
        properties = {name: part for name, part in schema.get("properties", {}).items() if name != META}
        texts = [name for name, part in properties.items() if part.get("type") == "string"]
        is_text = len(properties) == 1 == len(texts)
        if self._action == "text" and not is_text:
            raise ValueError(f"the actions of {self._url} are no single text but {', '.join(properties)}: env.options.action is tool")
        if is_text and self._action != "tool":
            self._text_field = texts[0]
            return
        required = [name for name in schema.get("required", ()) if name != META]
        parameters = {"type": "object", "properties": properties, "required": required}
        if "$defs" in schema:
            parameters["$defs"] = schema["$defs"]
        description = schema.get("description") or "Acts in the environment, and returns what is seen then."
        self.tools = ({"type": "function", "function": {"name": ACT, "description": description, "parameters": parameters}},)

    async def _first(self, data: Mapping[str, JSON]) -> _Seen:
        """The first observation, from the first session that the server has a place for."""
        assert self._http is not None
        wait_s = FIRST_WAIT_S
        while True:
            address = f"{self._url.replace('http', 'ws', 1)}/ws"
            self._socket = await self._http.ws_connect(address, max_msg_size=MAX_MESSAGE_BYTES)
            try:
                return await self._exchange("reset", data)
            except _Refused as refused:
                await self._socket.close()
                if refused.code != "CAPACITY_REACHED":
                    raise OpenEnvFailed(f"{self._url} refused to begin: {refused}") from refused
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _exchange(self, kind: str, data: Mapping[str, JSON]) -> _Seen:
        assert self._socket is not None
        with suppress(ConnectionError):  # a server that is full says so, and closes: what it said is still to be read
            await self._socket.send_json({"type": kind, "data": data})
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise OpenEnvFailed(f"{self._url} closed the session in {kind} (WebSocket {message.type.name}, code {self._socket.close_code})")
        try:
            answer = json.loads(message.data)
            if answer["type"] == "error":
                found = answer["data"]
                raise _Refused(str(found.get("code")), _words(found))
            seen = answer["data"]
            reward = seen["reward"]
            return _Seen(dict(seen["observation"]), None if reward is None else float(reward), bool(seen["done"]))
        except (KeyError, TypeError, ValueError) as error:
            raise OpenEnvFailed(f"{self._url} answered {kind} with {message.data[:300]!r}, which is no observation") from error


def _of_the_model(refused: _Refused) -> str:
    """The fault of an action, in words.

    Raises:
        OpenEnvFailed: it is not the model's fault.
    """
    if refused.code != "VALIDATION_ERROR":
        raise OpenEnvFailed(f"the OpenEnv server reports {refused}") from refused
    return refused.text


def _words(found: Mapping[str, Any]) -> str:
    faults = [f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}" for each in found.get("errors") or ()]
    return "; ".join(faults) or str(found.get("message"))


def _notes(seen: _Seen) -> list[TurnNote]:
    meta = seen.observation.get(META)
    return [TurnNote(attachments={META: meta})] if meta else []


def _sum(rewards: Sequence[float]) -> float | None:
    return sum(rewards) if rewards else None
