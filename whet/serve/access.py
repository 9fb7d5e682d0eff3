"""Access to the server: keys, and the requests that a server without keys answers."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whet.serve.endpoint import error_response
from whet.serve.errors import ApiError

API_KEY, ADMIN_KEY = "WHET_API_KEY", "WHET_ADMIN_KEY"
"""Variables of the environment: a key on the command line would show in the list of processes."""
PUBLIC = frozenset({"/health"})
ADMIN = frozenset(
    {
        *("/abort_request", "/inference/v1/abort_requests"),
        *("/pause_generation", "/continue_generation", "/flush_cache", "/update_weights_from_disk"),
        *("/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed"),
        *("/end_weight_update", "/update_weight_version", "/weights_checker"),
    }
)
MIN_KEY = 16
"""Characters of a key."""


@dataclass(frozen=True, slots=True, repr=False)
class Keys:
    """Keys that clients must send. None: there is no such key."""

    api: str | None = None
    admin: str | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Keys:
        """Read the keys from environment variables.

        Raises:
            ValueError: a key is too short, or cannot be sent in a header.
        """
        for name in (API_KEY, ADMIN_KEY):
            key = environ.get(name)
            if key is not None and (len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key):
                raise ValueError(f"{name} must be {MIN_KEY} or more printable ASCII characters without spaces")
        return cls(environ.get(API_KEY), environ.get(ADMIN_KEY))

    def words(self) -> str:
        """Which of them there are."""
        there = [name for name, key in ((API_KEY, self.api), (ADMIN_KEY, self.admin)) if key is not None]
        return ", ".join(there) or "none"


def is_loopback(host: str) -> bool:
    """True if an address can be reached from this machine alone. A name must have only such addresses."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(f"host: {host!r} is no address and no name that this machine knows ({error.strerror})") from None
    return all(ipaddress.ip_address(str(item[4][0]).partition("%")[0]).is_loopback for item in found)


def check_exposure(host: str, keys: Keys) -> None:
    """Refuse to serve other machines without a key.

    Raises:
        ValueError: other machines could reach the server and there is no key.
    """
    if keys.api is None and not (host and is_loopback(host)):
        raise ValueError(
            f"host {host!r} can be reached from other machines: set the environment variable {API_KEY} to a key that clients must send "
            f"(and {ADMIN_KEY} for the routes of weights and control), or keep host=127.0.0.1"
        )


class Guard:
    """Lets through what may pass, and nothing new while the server ends.

    Args:
        app: the guarded application.
        keys: keys that clients must send.
        exposed: True if other machines can reach the server: then routes of weights and control need a key of their own.
    """

    def __init__(self, app: ASGIApp, keys: Keys, *, exposed: bool) -> None:
        self._app, self._keys, self._exposed = app, keys, exposed
        self.draining = False
        """True once the server is about to end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        receive, send = closed_unless_read(headers, receive, send)
        try:
            self._check(scope["path"], headers)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        if self._keys.api is None:
            _refuse_web_pages(headers)
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after_s=30)
        if path in PUBLIC:
            return
        wanted = self._wanted(path)
        if wanted and not _holds(headers, wanted):
            raise ApiError(401, "the key is missing or wrong: send it as Authorization: Bearer KEY", code="invalid_api_key")

    def _wanted(self, path: str) -> list[str]:
        """The keys that open a route; none: it is open."""
        api, admin = self._keys.api, self._keys.admin
        if path in ADMIN:
            if admin is None and self._exposed:
                raise ApiError(403, f"{path} is closed: a server that other machines reach needs {ADMIN_KEY} for it", code="no_admin_key")
            return [key for key in (admin or api,) if key is not None]
        return [key for key in (api, admin) if key is not None] if api is not None else []


def closed_unless_read(headers: Headers, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """The connection's ends, of which an answer that comes before the whole body was read closes the connection: nobody reads the rest."""
    whole = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

    async def receive_noting() -> Message:
        nonlocal whole
        message = await receive()
        whole = whole or (message["type"] == "http.request" and not message.get("more_body", False))
        return message

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start" and not whole:
            message = {**message, "headers": [*message.get("headers", []), (b"connection", b"close")]}
        await send(message)

    return receive_noting, send_closing


def _holds(headers: Headers, wanted: list[str]) -> bool:
    """True if the request carries one of the keys. The time does not depend on which characters of it
    are right."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = headers.get("x-api-key", "")
    matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in wanted]
    return any(matches)


def _refuse_web_pages(headers: Headers) -> None:
    """Without a key, a page in a browser on this machine could use the server: it is recognised by what browsers send of it."""
    hosts = [_host_in("Host", f"//{headers.get('host', '')}")]
    if "origin" in headers:
        hosts.append(_host_in("Origin", headers["origin"]))
    foreign = [host for host in hosts if host is None or not _names_this_machine(host)]
    if foreign or headers.get("sec-fetch-site", "none") == "cross-site":
        message = f"a server without a key answers this machine's own programs only; set {API_KEY} to open it"
        raise ApiError(403, message, code="foreign_host")


def _host_in(header: str, url: str) -> str | None:
    """Host in a header with an address.

    Raises:
        ApiError: 400 for a header that is no address.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
        return parts.hostname
    except ValueError as error:
        raise ApiError(400, f"the header {header} is malformed: {error}", param=header, code="invalid_header") from None


def _names_this_machine(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
