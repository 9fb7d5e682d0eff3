"""A server that searches a corpus, with Search-R1's protocol."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import uvicorn
from pydantic import Field
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from whet.env.search.index import Hit
from whet.env.search.searcher import Searcher
from whet.serve.access import Guard, Keys, is_loopback
from whet.serve.app import ExactRoute
from whet.serve.bodies import Body, BodyMemory, parse_body, read_json
from whet.serve.connection import bounded
from whet.serve.endpoint import error_response
from whet.serve.errors import KINDS, ApiError
from whet.types import JSON

MAX_BODY_BYTES = 1 << 20
MAX_QUERIES, MAX_QUERY_CHARS, MAX_TOP_K = 256, 2000, 100
MAX_CONNECTIONS = 256
MAX_WAITING = 64
"""Requests that are searched for or wait for it; further ones are asked to come again."""
END_S = 5


class Retrieve(Body):
    """The body of a request to `/retrieve`."""

    queries: list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]] = Field(min_length=1, max_length=MAX_QUERIES)
    topk: int = Field(default=3, ge=1, le=MAX_TOP_K)
    return_scores: bool = False


class Retriever:
    """Answers requests. One thread searches: bm25s and the model use the cores themselves.

    Args:
        searcher: of the corpus.
    """

    def __init__(self, searcher: Searcher) -> None:
        self._searcher = searcher
        self._room = BodyMemory(MAX_BODY_BYTES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="whet-search")
        self._texts = ThreadPoolExecutor(1, thread_name_prefix="whet-texts")
        self._waiting = 0

    def app(self) -> Starlette:
        """Everything that is served, without who may ask for it."""
        routes = [ExactRoute("/retrieve", self._retrieve, methods=["POST"]), ExactRoute("/health", self._health, methods=["GET"])]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _no_route, ApiError: _refused, Exception: _fault})
        app.router.redirect_slashes = False
        return app

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok", "documents": len(self._searcher.documents)})

    async def _retrieve(self, request: Request) -> Response:
        asked = parse_body(Retrieve, await read_json(request, self._room, self._texts))
        if self._waiting >= MAX_WAITING:
            raise ApiError(503, f"{MAX_WAITING} requests wait already; try again later", code="server_full", retry_after_s=1)
        self._waiting += 1
        try:
            return JSONResponse(await asyncio.get_running_loop().run_in_executor(self._thread, self._answer, asked))
        finally:
            self._waiting -= 1

    def _answer(self, asked: Retrieve) -> JSON:
        return {"result": [[_entry(hit, asked.return_scores) for hit in self._searcher.search(q, asked.topk)] for q in asked.queries]}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._texts.shutdown(wait=False, cancel_futures=True)


def _entry(hit: Hit, scored: bool) -> JSON:
    document: dict[str, JSON] = {"id": hit.document.id, "contents": hit.document.contents, "title": hit.document.title}
    return {"document": document, "score": hit.score} if scored else document


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in KINDS else 400
    return error_response(ApiError(status, f"{request.method} {request.scope['path'][:200]}: {error.detail}"), request.scope["path"])


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope["path"])


async def _fault(request: Request, error: Exception) -> Response:
    """Answer 500. The traceback is in the server's log."""
    return error_response(ApiError(500, f"the retriever failed: {type(error).__name__}; its log says where"), request.scope["path"])


class RetrieverServer(uvicorn.Server):
    """A uvicorn server that says when it listens. Ctrl-C and SIGTERM end it.

    Args:
        retriever: answers.
        host: it is bound to; a host that other machines reach needs a key.
        keys: keys that clients must send.
        ready: called once it listens.
    """

    def __init__(self, retriever: Retriever, host: str, keys: Keys, ready: Callable[[], None]) -> None:
        guard = Guard(retriever.app(), keys, exposed=not is_loopback(host))
        limits = {"http": bounded(MAX_CONNECTIONS), "h11_max_incomplete_event_size": 65536, "timeout_graceful_shutdown": END_S}
        quiet = {"access_log": False, "log_level": "warning", "server_header": False}
        super().__init__(uvicorn.Config(guard, ws="none", lifespan="off", **limits, **quiet))
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()
