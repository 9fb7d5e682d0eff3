"""Access to the viewer, and the headers of all its answers."""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page runs scripts of its own address alone, none of them inline."""
HOST = re.compile(r"([A-Za-z0-9.-]+)(?::[0-9]{1,5})?")
"""A Host header: a name, and a port where it is not 80. It need not be this server's: a tunnel may have another."""
ALWAYS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class ViewerGuard:
    """Lets through GET and HEAD to an address that begins with the token, from a browser that asked for one of the hosts by name.

    Another user of the machine cannot guess the token; a page of another site has neither it nor the right Host.

    Args:
        app: the guarded application; it sees paths without the token.
        token: the first part of every address.
        hosts: names that a request may ask for.
    """

    def __init__(self, app: ASGIApp, token: str, hosts: Sequence[str]) -> None:
        self._app, self._token, self._hosts = app, token, frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_more(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in ALWAYS.items():
                    headers[name] = value
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            status, text = refusal
            await PlainTextResponse(text + "\n", status, headers={"connection": "close"})(scope, receive, send_more)
            return
        inner = {**scope, "path": "/" + scope["path"].split("/", 2)[2]}
        await self._app(inner, receive, send_more)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        if not self._knows(headers.getlist("host")):
            return 403, "this viewer answers at the address that it printed, and at no other name"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "this viewer answers its own page alone"
        parts = scope["path"].split("/", 2)
        if len(parts) < 3 or not hmac.compare_digest(parts[1].encode("utf-8", "replace"), self._token.encode()):
            return 403, "open the whole address that `whet view` printed: it has a token of this start"
        return None if scope["method"] in ("GET", "HEAD") else (405, "the viewer only shows")

    def _knows(self, hosts: Sequence[str]) -> bool:
        found = HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        return found is not None and found[1].lower() in self._hosts
