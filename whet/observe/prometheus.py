"""`GET /metrics` of a run, for Prometheus: its newest metrics, its engine's members, and the metrics of each server.

The route is answered by a thread of its own. A scrape waits for servers within a bound, and no scrape makes the run wait or fail.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from whet.observe.exposition import CONTENT_TYPE, Family, Labels, gauge, labelled, legal_name, merge, parse, render

if TYPE_CHECKING:
    from aiohttp import web

SERVERS_S = 2.0
"""Time that servers have to answer a scrape, all at once."""
END_S = 5.0
"""For the thread to end."""
STEP = "whet_step"
UP = "whet_server_up"
LOCALHOST = "localhost"


class EngineSource(Protocol):
    """An engine's part of a scrape. All of it is called on the thread of the scrape."""

    def families(self) -> Sequence[Family]:
        """The state of the engine's members, without waiting."""
        ...

    async def texts(self, timeout_s: float) -> Mapping[str, str | None]:
        """The text of each server's own `/metrics`, by the server's name: "" where it has no such route, None where it did not answer
        within the time."""
        ...


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
        ValueError: it is no such address, or other machines could reach it.
    """
    host, colon, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{text!r} is no address to listen at; write 127.0.0.1:9400, or 127.0.0.1:0 for any free port")
    try:
        near = host == LOCALHOST or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ValueError(f"{host!r} is no address of this machine; write 127.0.0.1:{port}") from None
    if not near:
        raise ValueError(
            f"{host}:{port} can be reached from other machines, and whoever reaches it reads the run's metrics without a key: write "
            f"127.0.0.1:{port}, and have a Prometheus agent on this machine, or a tunnel, read it there"
        )
    return host, int(port)


class PrometheusTracker:
    """A `Tracker` that answers `GET /metrics` with the newest value of each metric.

    Args:
        address: `HOST:PORT` on this machine; port 0: one that is free.

    Raises:
        ValueError: the address is taken.
    """

    def __init__(self, address: str) -> None:
        host, port = address_of(address)
        self._values: dict[str, float] = {}
        self._step: int | None = None
        self._lock = threading.Lock()
        self.source: EngineSource | None = None
        """The engine's; None: it has no members, or is not there yet."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._bound = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ValueError(
                f"observe.prometheus: cannot listen on {host}:{port}: {error.strerror}; choose another port (0: any)"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._bound.getsockname()[1]}/metrics"
        names = {LOCALHOST, "127.0.0.1", "[::1]", shown}
        self._names = names | {f"{name}:{self._bound.getsockname()[1]}" for name in names}
        self._scraping: asyncio.Task[str] | None = None
        self._loop, self._end = asyncio.new_event_loop(), asyncio.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prometheus", daemon=True)
        self._thread.start()
        self._up.wait(END_S)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step."""
        with self._lock:
            self._step = step
            self._values.update(values)

    def close(self) -> None:
        """Answer no more. A scrape that is under way is broken off."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(END_S)
        self._bound.close()

    def families(self) -> list[Family]:
        """The run's own metrics, each under a legal name; names that become one have the label `metric`."""
        with self._lock:
            step, values = self._step, dict(self._values)
        found: dict[str, list[str]] = {}
        for name in values:
            found.setdefault(legal_name(name), []).append(name)
        out = [] if step is None else [gauge(STEP, "rollouts or steps that the newest values are of", {(): float(step)})]
        for legal, names in sorted(found.items()):
            alone = len(names) == 1
            by_label: dict[Labels, float] = {(() if alone else (("metric", name),)): values[name] for name in names}
            out.append(gauge(legal, names[0] if alone else "", by_label))
        return out

    async def scrape(self) -> str:
        """The text of everything: of the run, of its engine's members, and of its servers."""
        source, own = self.source, self.families()
        if source is None:
            return render(merge(own))
        texts = await source.texts(SERVERS_S)
        ups: dict[Labels, float] = {}
        theirs: list[Family] = []
        for server, text in texts.items():
            read = None if text is None else _read(text)
            ups[(("server", server),)] = float(read is not None)
            theirs += labelled(read or [], "server", server)
        answered = [gauge(UP, "1 if the server answered this scrape", ups)] if ups else []
        return render(merge([*own, *source.families(), *answered, *theirs]))

    # The thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        from aiohttp import web

        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        try:
            await web.SockSite(runner, self._bound).start()
            self._up.set()
            await self._end.wait()
        finally:
            if self._scraping is not None:
                self._scraping.cancel()
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        """One scrape at a time: callers that come meanwhile get the same."""
        from aiohttp import web

        if request.headers.get("Host", "") not in self._names:  # a page of a site whose name leads here
            return web.Response(status=403, text="these metrics are read at the address that the run printed, and at no other name\n")
        if self._scraping is None or self._scraping.done():
            self._scraping = asyncio.ensure_future(self.scrape())
            self._scraping.add_done_callback(lambda done: done.cancelled() or done.exception())  # the callers may be gone
        try:
            text = await asyncio.shield(self._scraping)
        except Exception as error:  # whatever an engine's members are in the middle of: the next scrape may succeed, and the run goes on
            return web.Response(status=500, text=f"this scrape failed: {type(error).__name__}: {error}\n")
        return web.Response(body=text.encode("utf-8", "backslashreplace"), headers={"Content-Type": CONTENT_TYPE})


def _read(text: str) -> list[Family] | None:
    """The families of a server's text; None: it is not of the format."""
    try:
        return parse(text)
    except ValueError:
        return None
