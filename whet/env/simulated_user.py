"""The environment `simulated_user`: the assistant, with tools or without, talks to a user whom a model plays."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from string import Formatter
from typing import Any, Literal

from whet.data.parsers import Parsed
from whet.env.base import Env, SingleTurn, Step
from whet.env.dialogue import Dialogue, Dialogues
from whet.env.http import JsonClient, Retries, bearer
from whet.env.resources import per_run
from whet.env.rollout import TrajectoryRun
from whet.env.tool_env import ReplyLimit
from whet.types import JSON, Message, Outcome, Task, TurnNote

UserSays = Callable[[str], Awaitable[str | None]]
"""The user's next words, after those of the assistant; None where the limits leave no room."""
BEGIN = "Begin."
"""Message to the user's model in answer to which it says the first words."""


@dataclass(slots=True)
class Clients:
    """Clients of the servers that play users, one for each address and key, for a whole run."""

    by_server: dict[tuple[Any, ...], JsonClient] = field(default_factory=dict[tuple[Any, ...], JsonClient])

    def of(self, url: str, timeout_s: float, max_concurrent: int, key_env: str | None) -> JsonClient:
        """The client of a server."""
        server = (url, timeout_s, max_concurrent, key_env)
        if server not in self.by_server:
            self.by_server[server] = JsonClient(url, timeout_s, max_concurrent, bearer(key_env))
        return self.by_server[server]


@asynccontextmanager
async def open_clients() -> AsyncIterator[Clients]:
    """The clients of a run."""
    clients = Clients()
    try:
        yield clients
    finally:
        for client in clients.by_server.values():
            client.close()


@dataclass(frozen=True, slots=True)
class UserServer:
    """A server with OpenAI's chat completions, whose model plays the user: the table `server` of the environment's options."""

    url: str
    """Address of its chat completions, such as http://127.0.0.1:8000/v1/chat/completions."""
    model: str = "user"
    """Name of the model there."""
    api_key_env: str | None = None
    """Environment variable with a key, sent as a bearer token."""
    temperature: float = 1.0
    max_tokens: int = 512
    """Tokens of one of the user's replies."""
    timeout_s: float = 60.0
    """Seconds of each attempt."""
    attempts: int = 4
    """Tries until a request counts as failed."""
    backoff_s: float = 1.0
    """Wait before the second try; doubled each time up to 30 s."""
    max_concurrent: int = 64
    """Requests of a run under way at once."""

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"env.options.server.url is {self.url!r}; write http://HOST:PORT/v1/chat/completions")
        if min(self.max_tokens, self.attempts, self.max_concurrent) < 1 or self.timeout_s <= 0 or self.backoff_s < 0:
            raise ValueError("env.options.server: max_tokens, attempts and max_concurrent are at least 1, timeout_s is above 0")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise ValueError(f"the environment variable {self.api_key_env} (env.options.server.api_key_env) is not set")


class SimulatedUserEnv:
    """The environment `simulated_user`.

    Args:
        instructions: who the user is and what they want, as the system prompt of the model that plays them. `{name}` becomes an entry
            of the row's metadata, `{prompt}` for the text of the prompt's last message; a brace is written twice.
        server: a server that plays the user (`UserServer`). Without one the policy does, and does not train on it.
        opening: prompt: the prompt's last message is the user's first; user: the user's model says the first words, and of the prompt the
            assistant sees the system messages alone.
        stop: phrases with which the user ends the conversation.
        max_exchanges: answers of the assistant, after which the conversation is over.
        assistant: the environment of the assistant's tools.
        limit: the length of the user's words.
        clients: the run's clients.

    Raises:
        ValueError: an option makes no sense.
    """

    def __init__(
        self,
        instructions: str,
        server: Mapping[str, Any] | None = None,
        opening: Literal["prompt", "user"] = "prompt",
        stop: Sequence[str] = ("[DONE]",),
        max_exchanges: int = 8,
        *,
        assistant: Env | None = None,
        limit: ReplyLimit | None = None,
        clients: Clients = per_run(open_clients),
    ) -> None:
        if not instructions.strip():
            raise ValueError("env.options.instructions is empty: say who the user is and what they want")
        if opening not in ("prompt", "user"):
            raise ValueError(f"env.options.opening is prompt or user, not {opening!r}")
        if isinstance(stop, str) or not all(stop):
            raise ValueError(f"env.options.stop is a list of phrases, not {stop!r}")
        if max_exchanges < 1:
            raise ValueError(f"env.options.max_exchanges must be at least 1, not {max_exchanges}")
        try:
            self._server = None if server is None else UserServer(**server)
            list(Formatter().parse(instructions))
        except (TypeError, ValueError) as error:
            raise ValueError(f"env.options of simulated_user: {error}") from error
        self._instructions, self._opening, self._stop, self._max_exchanges = instructions, opening, tuple(stop), max_exchanges
        self._assistant, self._limit, self._clients = assistant or SingleTurn(), limit or ReplyLimit(), clients

    @property
    def tools(self) -> Sequence[Mapping[str, JSON]]:
        return self._assistant.tools

    async def start(self, task: Task) -> Task:
        return task

    async def step(self, reply: Parsed) -> Step:
        raise AssertionError("a simulated user takes no turns: the conversation plays by itself")

    async def close(self) -> None:
        await self._assistant.close()

    async def play(self, run: TrajectoryRun) -> Outcome:
        """The conversation, up to the user's stop phrase, a tool's stop, or a limit."""
        async with run.waits_for("env.start"):
            run.task = await self._assistant.start(run.task)
        async with Dialogues(run) as talks:
            says, words = self._user(run, talks), ""
            if self._opening == "user":
                opened = await says("")
                if opened is None:
                    return Outcome.TRUNCATED
                words = self._limit.shortened(opened)
            assistant = talks.begin(self._first(run.task, words), self.tools, task_tools=True)
            return await self._talk(run, assistant, says)

    async def _talk(self, run: TrajectoryRun, assistant: Dialogue, says: UserSays) -> Outcome:
        while True:
            parsed = await assistant.reply()
            if parsed is None or assistant.cut:
                return Outcome.TRUNCATED
            async with run.waits_for("env.step"):
                step = await self._assistant.step(parsed)
            assistant.note(step.reward, step.notes)
            run.counts.update(step.counts)
            if not step.done:
                assistant.add(*step.messages)
                continue
            run.counts["exchanges"] += 1
            run.stop = step.stop or ("max_exchanges" if run.counts["exchanges"] == self._max_exchanges else None)
            if run.stop is not None:
                return Outcome.COMPLETED
            words = await says(parsed.message.content)
            if words is None:
                return Outcome.TRUNCATED
            assistant.note(notes=(TurnNote(attachments={"user": words}),))
            if any(phrase in words for phrase in self._stop):
                run.stop = "user_stopped"
                return Outcome.COMPLETED
            assistant.add(Message("user", self._limit.shortened(words)))

    def _first(self, task: Task, words: str) -> tuple[Message, ...] | str:
        """The assistant's prompt."""
        if self._opening == "prompt":
            return task.prompt
        system = () if isinstance(task.prompt, str) else (message for message in task.prompt if message.role == "system")
        return (*system, Message("user", words))

    def _user(self, run: TrajectoryRun, talks: Dialogues) -> UserSays:
        prompt = run.task.prompt if isinstance(run.task.prompt, str) else run.task.prompt[-1].content
        view = [Message("system", self._instructed(run.task, prompt)), Message("user", BEGIN)]
        if self._opening == "prompt":
            view.append(Message("assistant", prompt))
        return self._by_policy(talks, view) if self._server is None else self._by_server(run, self._server, view)

    def _by_policy(self, talks: Dialogues, view: Sequence[Message]) -> UserSays:
        """The policy plays the user, in a conversation that does not train."""
        talk: Dialogue | None = None

        async def says(words: str) -> str | None:
            nonlocal talk
            heard = (Message("user", words),) if words or talk is not None or self._opening == "prompt" else ()
            if talk is None:
                talk = talks.begin((*view, *heard), trains=False)
            else:
                talk.add(*heard)
            parsed = await talk.reply()
            return None if parsed is None else parsed.message.content

        return says

    def _by_server(self, run: TrajectoryRun, server: UserServer, view: list[Message]) -> UserSays:
        client = self._clients.of(server.url, server.timeout_s, server.max_concurrent, server.api_key_env)
        retries, what = Retries(server.attempts, server.backoff_s), f"the simulated user of task {run.task.id!r}"

        async def says(words: str) -> str:
            if words or view[-1].role == "assistant":
                view.append(Message("user", words))
            asked = {
                "model": server.model,
                "messages": [message.to_dict() for message in view],
                "temperature": server.temperature,
                "max_tokens": server.max_tokens,
            }
            async with run.waits_for("env.step"):
                answer = await client.post(asked, _words, retries, what)
            view.append(Message("assistant", answer))
            return answer

        return says

    def _instructed(self, task: Task, prompt: str) -> str:
        """The user's instructions for a row.

        Raises:
            ValueError: they name an entry that the row has not.
        """
        given = {**{name: str(value) for name, value in task.metadata.items()}, "prompt": prompt}
        try:
            return self._instructions.format_map(given)
        except (KeyError, IndexError, AttributeError) as error:
            place = f" ({task.origin})" if task.origin else ""
            known = ", ".join(given)
            raise ValueError(f"env.options.instructions names {error}, which task {task.id!r}{place} has not: it has {known}") from error


def _words(answer: JSON) -> str:
    """The text of a chat completion.

    Raises:
        ValueError: it is none.
    """
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"it is no chat completion: {str(answer)[:200]!r}") from None
    if not isinstance(content, str):
        raise ValueError("the user's model gave no text")
    return content
