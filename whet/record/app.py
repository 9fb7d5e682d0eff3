"""The recording endpoint: the routes of `whet serve`, each request in the session that its key names."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from whet.record.session import Answered, Session
from whet.serve.app import COUNT, GENERATE
from whet.serve.bodies import read_json
from whet.serve.endpoint import DONE, STREAM_HEADERS, answered, event_text
from whet.serve.errors import ApiError

KEEP_ALIVE_S = 10.0
"""Between two comments of a stream whose reply is still being sampled."""
FIRST_S = 0.2
"""Until the first of them: an error before it has a status of its own."""
RETRY = "x-stainless-retry-count"
"""Header in which the official clients count their attempts."""


class RecorderApp:
    """The ASGI application. A key opens one session, as `Authorization: Bearer KEY`, as `x-api-key`, or in the path: `/s/KEY/v1/…`.

    Args:
        find: the session of a key, which is empty where a request has none; None: no session has it.
        by_header: false: keys of headers are not those of sessions.
    """

    def __init__(self, find: Callable[[str], Session | None], *, by_header: bool = True) -> None:
        self._find, self._by_header = find, by_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        key, path = "", str(scope["path"])
        if path.startswith("/s/"):
            key, _, rest = path.removeprefix("/s/").partition("/")
            path = f"/{rest}"
        await answered(self._work(key, scope, receive, send, path), {**scope, "path": path}, receive, send)

    async def _work(self, key: str, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        if path == "/health":
            await JSONResponse({})(scope, receive, send)
            return
        headers = Headers(scope=scope)
        session = self._session(key, headers)
        if path == "/v1/models" or path.startswith("/v1/models/"):
            await JSONResponse(_models(path))(scope, receive, send)
            return
        if path not in GENERATE and path not in COUNT:
            raise ApiError(404, f"there is no route {path[:200]}; there are {', '.join((*GENERATE, *COUNT))}")
        if scope["method"] != "POST":
            raise ApiError(405, f"{path} is asked with POST")
        body = await read_json(Request(scope, receive), session.service.bodies, session.service.texts)
        if path in COUNT:
            await (await session.count(COUNT[path], body))(scope, receive, send)
            return
        answering = asyncio.ensure_future(session.answer(path, GENERATE[path], body, again=_is_retry(headers)))
        if isinstance(body, dict) and body.get("stream") is True:
            await _streamed(answering, send, path)
        else:
            await JSONResponse((await answering).whole)(scope, receive, send)

    def _session(self, key: str, headers: Headers) -> Session:
        """The session of a request.

        Raises:
            ApiError: 401 without the key of an open session.
        """
        if not key and self._by_header:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            key = given.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        session = self._find(key)
        if session is None:
            where = "it is in OPENAI_API_KEY and ANTHROPIC_API_KEY of the program"
            raise ApiError(401, f"no session has this key: {where}", code="invalid_api_key")
        return session


def _is_retry(headers: Headers) -> bool:
    count = headers.get(RETRY, "0")
    return count.isdecimal() and len(count) < 9 and int(count) > 0


def _models(path: str) -> dict[str, Any]:
    name = path.removeprefix("/v1/models").lstrip("/")
    card = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "whet"}
    return card if name else {"object": "list", "data": [card]}


async def _streamed(answering: asyncio.Future[Answered], send: Send, path: str) -> None:
    """Write an answer as server-sent events once it is there, with comments until then."""
    begun = False
    try:
        while not answering.done():
            await asyncio.wait({answering}, timeout=KEEP_ALIVE_S if begun else FIRST_S)
            if not answering.done():
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
                    begun = True
                await send({"type": "http.response.body", "body": b": waiting\n\n", "more_body": True})
    finally:
        answering.cancel()  # a client that is gone waits no more; the session samples on
    try:
        found = answering.result()
    except ApiError as error:
        if not begun:
            raise
        found = Answered([{"type": "error", **error.body_for(path)}], named=path in ("/v1/messages", "/v1/responses"))
    if not begun:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
    text = "".join(event_text(event, named=found.named) for event in found.events)
    await send({"type": "http.response.body", "body": (text if found.named else text + DONE).encode(), "more_body": False})
