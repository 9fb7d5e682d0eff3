"""A proxy before a real server that plants faults: what a server might do wrong, seen from whet."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import aiohttp
from aiohttp import web

GENERATE = "/inference/v1/generate"
Alter = Callable[[dict[str, Any]], None]


def fewer_logprobs(event: dict[str, Any]) -> None:
    """Loses a log-prob of an event with tokens."""
    content = (event["choices"][0].get("logprobs") or {}).get("content")
    if content:
        content.pop()


def wrong_version(event: dict[str, Any]) -> None:
    """Says that other weights sampled the reply."""
    for span in event["choices"][0].get("weight_versions") or ():
        span["version"] = "another"


class FaultyProxy:
    """A server's address with planted faults, on an event loop of its own.

    Args:
        url: the server behind it.
        faults: name of the fault of a reply, by the number of the reply: `500`, `cut`, `slow`, `fewer`, `version`.
        refused: status of a route that fails once, by its path and the number of its call.
    """

    def __init__(self, url: str, faults: Mapping[int, str] | None = None, refused: Mapping[tuple[str, int], int] | None = None) -> None:
        self._behind, self._faults, self._refused = url, dict(faults or {}), dict(refused or {})
        self.planted: list[str] = []
        """Faults so far."""
        self._calls: Counter[str] = Counter()
        self._loop, up = asyncio.new_event_loop(), threading.Event()
        self._ends = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(up)), daemon=True)
        self._thread.start()
        assert up.wait(10)

    def close(self) -> None:
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(10)

    async def _serve(self, up: threading.Event) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._pass)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        alone = aiohttp.TCPConnector(force_close=True)  # a connection that the server closes meanwhile would be another fault
        async with aiohttp.ClientSession(connector=alone, timeout=aiohttp.ClientTimeout(total=None)) as self._session:
            up.set()
            await self._ends.wait()
            await runner.cleanup()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body, path = await request.read(), request.path
        replies = path == GENERATE and b'"stream": true' in body.replace(b'":true', b'": true')
        name = "reply" if replies else path
        self._calls[name] += 1
        if status := self._refused.get((path, self._calls[name])):
            self.planted.append(f"{path} {status}")
            return web.json_response({"error": {"message": "planted"}}, status=status)
        fault = self._faults.get(self._calls["reply"]) if replies else None
        if fault is not None:
            self.planted.append(fault)
        if fault == "500":
            return web.json_response({"error": {"message": "planted"}}, status=500)
        async with self._session.request(request.method, self._behind + str(request.rel_url), data=body, headers=_plain(request)) as answer:
            out = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "text/plain")})
            await out.prepare(request)
            count = 0
            async for line in answer.content:
                if fault and line.startswith(b"data: {"):
                    count += 1
                    if fault == "slow":
                        await asyncio.sleep(0.05)
                    if fault == "cut" and count == 5 and request.transport is not None:
                        request.transport.abort()
                        return out
                    line = _altered(line, fault)
                await out.write(line)
            return out


def _altered(line: bytes, fault: str) -> bytes:
    alter = {"fewer": fewer_logprobs, "version": wrong_version}.get(fault)
    if alter is None:
        return line
    event = json.loads(line[6:])
    alter(event)
    return f"data: {json.dumps(event)}\n".encode()


def _plain(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() in ("content-type", "authorization")}
