"""The way of a request to its answer: prepared, run, and written whole or as server-sent events, while
its client is connected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from whet.serve.answers import Answer
from whet.serve.bodies import read_json
from whet.serve.errors import ApiError
from whet.serve.service import Service
from whet.types import JSON

Prepare = Callable[[Service, JSON], Awaitable[Answer]]
Handle = Callable[[Service, JSON], Awaitable[Response]]
SEND_TIMEOUT_S = 60.0
"""For a client to take what it is sent: one that reads no further counts as gone."""
DONE = "data: [DONE]\n\n"
"""End of a stream whose events have no names."""
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Generation:
    """The ASGI endpoint of a route that generates.

    Args:
        service: the service.
        prepare: from a request's body to an answer to be filled.
    """

    def __init__(self, service: Service, prepare: Prepare) -> None:
        self._service, self._prepare = service, prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            body = await read_json(Request(scope, receive), self._service.bodies, self._service.texts)
            await _while_there(receive, generated(body))

        async def generated(body: JSON) -> None:
            answer = await self._prepare(self._service, body)
            await self._run(answer, _Events(send, named=answer.names_events) if answer.stream else _Whole(scope, receive, send))

        await answered(work(), scope, receive, send)

    async def _run(self, answer: Answer, writer: _Events | _Whole) -> None:
        try:
            async with aclosing(self._service.calls.run(answer.call)) as pieces:
                async for place, chunk in pieces:
                    answer.take(place, chunk)
                    if isinstance(writer, _Events):
                        await writer.send_all(answer.events(place))
            if isinstance(writer, _Events):
                await writer.send_all(answer.closing())
                await writer.end()
            else:
                await writer.send(answer.whole())
        except ApiError as error:
            if not writer.has_begun:
                raise
            assert isinstance(writer, _Events), "a whole answer begins with its end"
            await writer.send_all(answer.failed(error))
            await writer.end()


class CommandEndpoint:
    """The ASGI endpoint of a route that answers at once.

    Args:
        service: the service.
        handle: makes the answer from a request's body.
        reads: True if the route has a body; otherwise none is read, even if one is sent.
        stays: True if the work is done to its end where its client goes away.
    """

    def __init__(self, service: Service, handle: Handle, *, reads: bool = True, stays: bool = True) -> None:
        self._service, self._handle, self._reads, self._stays = service, handle, reads, stays

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def work() -> None:
            body: JSON = {}
            if self._reads:
                body = await read_json(Request(scope, receive), self._service.bodies, self._service.texts)
            await (handled(body) if self._stays else _while_there(receive, handled(body)))

        async def handled(body: JSON) -> None:
            await (await self._handle(self._service, body))(scope, receive, send)

        await answered(work(), scope, receive, send)


async def answered(work: Coroutine[Any, Any, None], scope: Scope, receive: Receive, send: Send) -> None:
    """Run `work`, which answers a request; its client gets an error that occurs before the answer has
    started."""
    try:
        await work
    except ClientDisconnect:  # there is no client left
        return
    except ApiError as error:
        await error_response(error, scope["path"])(scope, receive, send)


def error_response(error: ApiError, path: str) -> Response:
    """The error in the form of the route at `path`."""
    return JSONResponse(error.body_for(path), error.status, headers=dict(error.headers))


async def _while_there(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` unless the client goes away first: then it is cancelled, and has ended when this raises.

    Raises:
        ClientDisconnect: the client went away.
    """
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        await working
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def _taken() -> AsyncIterator[None]:
    """Bound what is sent inside.

    Raises:
        ClientDisconnect: the client does not take it.
    """
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            yield
    except TimeoutError:
        raise ClientDisconnect from None


def event_text(event: Any, *, named: bool) -> str:
    """A server-sent event; `named`: under the name that is its `type`."""
    data = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"event: {event['type']}\ndata: {data}\n\n" if named else f"data: {data}\n\n"


class _Whole:
    """An answer in one piece."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._connection = (scope, receive, send)
        self.has_begun = False

    async def send(self, answer: JSON) -> None:
        response = JSONResponse(answer)
        self.has_begun = True
        async with _taken():
            await response(*self._connection)


class _Events:
    """An answer as server-sent events. It begins with the first of them, so that an error before it has a status of its own.

    Args:
        send: the connection's.
        named: True if each is sent under the name that is its `type`, and nothing follows the last one.
    """

    def __init__(self, send: Send, *, named: bool) -> None:
        self._send, self._named = send, named
        self.has_begun = False

    async def send_all(self, events: list[Any]) -> None:
        for event in events:
            await self._write(event_text(event, named=self._named))

    async def end(self) -> None:
        if not self._named:
            await self._write(DONE)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, text: str) -> None:
        async with _taken():
            if not self.has_begun:
                self.has_begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await self._send({"type": "http.response.body", "body": text.encode(), "more_body": True})
