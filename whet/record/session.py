"""One program's calls: made into prompts of recorded tokens, sampled, and kept as the turns of one trajectory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from starlette.responses import Response

from whet.data.parsers import ToolSchemas
from whet.data.replies import TAIL
from whet.data.template import Renderer
from whet.engine.base import closing_reply
from whet.record.tree import CallTree, RecordedCall, Rule, Spec, digest_of
from whet.serve.answers import Event
from whet.serve.endpoint import Handle, Prepare
from whet.serve.errors import ApiError
from whet.serve.service import Service, whole_prompt
from whet.types import JSON, Chunk, Finish, Message, Request, Turn, text_before
from whet.types.columns import Ints

SampleCall = Callable[[Request, int], AsyncIterator[Chunk]]
"""Samples a request; the number is that of the call in its session."""
MAX_ANSWERS = 4096
"""Answers of a session that are kept for a client that asks again."""
ABORT_GRACE_S = 5.0
"""Seconds for the engine to hand over what it sampled, once a session is closed."""
_SPEC: ContextVar[Spec] = ContextVar("spec")
_SESSION: ContextVar[Session] = ContextVar("session")


@dataclass(slots=True)
class Answered:
    """An answer as it was given: the events of a stream, or the whole."""

    events: list[Event] = field(default_factory=list[Event])
    named: bool = False
    """The events are sent under names."""
    whole: JSON = None
    error: ApiError | None = None
    """The error that ended the stream, whose last events it is."""


@dataclass(frozen=True, slots=True)
class Training:
    """Which calls of a program train."""

    untrained_models: tuple[str, ...] = ()
    """Patterns of model names whose calls are auxiliary: recorded, and not trained."""
    untrained_rules: tuple[str, ...] = ()
    """Rules whose calls do not train."""


class Session:
    """The calls of one program.

    Args:
        renderer: messages to tokens and back.
        stream: samples a request.
        training: which calls train.
        nucleus: the tokens that each was drawn from are recorded.
        routes: the experts that tokens went to are recorded.
        on_call: called with each reply that has ended.
    """

    def __init__(
        self,
        renderer: Renderer,
        stream: SampleCall,
        training: Training | None = None,
        *,
        nucleus: bool = False,
        routes: bool = False,
        on_call: Callable[[RecordedCall, Request], None] = lambda call, request: None,
    ) -> None:
        self.tree = CallTree()
        self.service: Service
        """Answers its requests; made by the environment that opens the session."""
        self.failure: Exception | None = None
        """The first error of the engine: no further call is sampled."""
        self._renderer, self._stream, self._training = renderer, stream, training or Training()
        self._nucleus, self._routes = nucleus, routes
        self._running: dict[int, RecordedCall] = {}
        self._answers: dict[str, asyncio.Task[Answered]] = {}
        self._closed = False
        self._on_call = on_call
        self.num_retries = 0
        """Requests that were answered with what an earlier attempt had got."""

    def turns(self) -> list[Turn]:
        """Every call that trains, sample by sample; one that is being sampled is there as far as it got."""
        calls = list(self.tree.trained())
        return [
            call.turn(
                first=i == 0,
                nucleus=self._nucleus,
                routes=self._routes,
                text=self._renderer.decode(call.reply.tokens.column()),
            )
            for i, call in enumerate(calls)
        ]

    async def answer(self, route: str, prepare: Prepare, body: JSON, *, again: bool) -> Answered:
        """The answer to a request. It is sampled to its end, whether or not its client waits.

        Args:
            route: path of the route.
            prepare: the route's own.
            body: the request.
            again: the client says that it has asked before: it gets the answer of that attempt.

        Raises:
            ApiError: the request cannot be answered.
        """
        if self._closed:
            raise ApiError(503, "the session is over", code="session_over")
        digest = digest_of(route + json.dumps(body, sort_keys=True, default=str))
        before = self._answers.get(digest)
        if again and before is not None and not (before.done() and (before.cancelled() or before.exception() is not None)):
            self.num_retries += 1
            return await asyncio.shield(before)
        task = asyncio.create_task(self._generated(prepare, body), name="recorded call")
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it any more
        self._answers.pop(digest, None)
        self._answers[digest] = task
        while len(self._answers) > MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return await asyncio.shield(task)

    async def count(self, handle: Handle, body: JSON) -> Response:
        """The answer to a request that samples nothing."""
        _SPEC.set(Spec())
        _SESSION.set(self)
        return await handle(self.service, body)

    async def close(self) -> None:
        """End what is being sampled; the tokens that the engine hands over are kept. Later requests are refused."""
        self._closed = True
        open_calls = [task for task in self._answers.values() if not task.done()]
        if open_calls:
            await self.service.calls.abort_all("the session is over")
            await asyncio.wait(open_calls, timeout=ABORT_GRACE_S)
        for task in open_calls:
            task.cancel()
        await asyncio.gather(*open_calls, return_exceptions=True)

    # The session's part in a request: the prompt's tokens, and the sampling.

    def of_messages(
        self, messages: tuple[Message, ...], tools: ToolSchemas, *, thinking: bool | None, drop_thinking: bool
    ) -> Callable[[], tuple[int, ...]]:
        """Look a conversation up; the function that is returned renders what is new of it."""
        spec = _SPEC.get()
        rest = self.tree.place(spec, messages, tools)

        def rendered() -> tuple[int, ...]:
            if spec.parent is not None:
                try:
                    spec.context = Ints.of(self._renderer.reply(rest, spec.parent.reply.tokens.column()))
                    return tuple(spec.prompt)
                except ValueError:  # the template cannot go on behind a reply
                    spec.parent, spec.rule = None, Rule.REWRITTEN
            spec.context = Ints.of(whole_prompt(self._renderer, messages, tools, thinking=thinking, drop_thinking=drop_thinking))
            return tuple(spec.context)

        return rendered

    def of_text(self, text: str) -> Callable[[], tuple[int, ...]]:
        """Look a completion's prompt up; the function that is returned encodes what is new of it."""
        spec = _SPEC.get()
        rest = self.tree.place_text(spec, text)

        def encoded() -> tuple[int, ...]:
            spec.context = Ints.of(self._renderer.encode(rest))
            return tuple(spec.prompt)

        return encoded

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        """Sample a request, and record it."""
        spec = _SPEC.get()
        if self.failure is not None:
            raise ApiError(503, f"the session has failed: {self.failure}")
        if request.sampling.grammar is not None or request.sampling.logit_bias:
            spec.trained = False  # drawn from another distribution than the model's own
        call = self.tree.begin(spec)
        self._running[call.number] = call
        asked = request.sampling
        sampling = replace(asked, nucleus=self._nucleus or asked.nucleus, routes=self._routes)
        mine = replace(request, sampling=sampling, routes_from=call.reply.routes_from(len(request.tokens)) if self._routes else 0)
        try:
            async with closing_reply(self._stream(mine, call.number)) as chunks:
                async for chunk in chunks:
                    call.reply.take(chunk, mine)
                    if chunk.finish is not None:
                        self._end(call, request)
                        self._on_call(call, request)
                    yield chunk
        except ApiError:
            raise
        except Exception as error:  # of the engine: it ends the program's trajectory, whatever the program does with the answer
            self.failure = self.failure or error
            raise
        finally:
            del self._running[call.number]
            if not call.reply.tokens:
                self.tree.drop(call)

    def _end(self, call: RecordedCall, request: Request) -> None:
        if call.reply.finish is Finish.ABORT:
            return
        tokens = call.reply.tokens.column()
        if call.spec.text is not None:
            text = self._renderer.decode(tokens[:-1] if tokens and tokens[-1] in request.sampling.stop_token_ids else tokens)
            self.tree.end(call, Message("assistant", text_before(text, request.sampling.stop)))
            return
        prompt, stop = call.spec.prompt[-TAIL:], request.sampling.stop
        parsed = self._renderer.parse(tokens, call.spec.schemas, prompt, stop)
        text = text_before(self._renderer.text_of(tokens), stop)
        replies = self._renderer.replies
        body = replies.split(text, opened=replies.opens_thinking(prompt)).body
        plain = [Message("assistant", each.strip("\n")) for each in (text, body)]  # with the thinking, and without it
        self.tree.end(call, parsed.message, *plain)

    async def _generated(self, prepare: Prepare, body: JSON) -> Answered:
        model = str(body.get("model") or "") if isinstance(body, dict) else ""
        spec = Spec(model, trained=not any(fnmatchcase(model, pattern) for pattern in self._training.untrained_models))
        _SPEC.set(spec)
        _SESSION.set(self)
        answer = await prepare(self.service, body)
        if spec.rule in self._training.untrained_rules:
            spec.trained = False
        found = Answered(named=answer.names_events)
        try:
            async with aclosing(self.service.calls.run(answer.call)) as pieces:
                async for place, chunk in pieces:
                    answer.take(place, chunk)
                    if answer.stream:
                        found.events += answer.events(place)
        except ApiError as error:
            if not found.events:
                raise
            found.events += answer.failed(error)
            found.error = error
            return found
        if answer.stream:
            found.events += answer.closing()
        else:
            found.whole = answer.whole()
        return found


class CurrentSession:
    """The part in requests of the session that each belongs to, for a service that all sessions share."""

    def of_messages(
        self, messages: tuple[Message, ...], tools: ToolSchemas, *, thinking: bool | None, drop_thinking: bool
    ) -> Callable[[], tuple[int, ...]]:
        return _SESSION.get().of_messages(messages, tools, thinking=thinking, drop_thinking=drop_thinking)

    def of_text(self, text: str) -> Callable[[], tuple[int, ...]]:
        return _SESSION.get().of_text(text)

    def generate(self, request: Request) -> AsyncIterator[Chunk]:
        return _SESSION.get().generate(request)
