"""Pages over HTTP: each connection goes to an address that was checked, and everything that arrives is bounded."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPResponse
from urllib.parse import urljoin

from whet.env.browse.address import AddressRefused, Egress, WebAddress, check_addresses, is_public

MAX_REDIRECTS = 5
REDIRECTS = frozenset({301, 302, 303, 307, 308})
BLOCK_BYTES = 1 << 16
HEADERS = {
    "User-Agent": "whet",
    "Accept": "text/html, application/xhtml+xml, application/pdf, text/*, application/json",
    "Accept-Encoding": "gzip",
    "Connection": "close",
}
"""All that is sent: no cookies, no credentials, no address that it came from."""


class FetchFailed(Exception):
    """A page that was not got. The text is the answer to the model.

    Args:
        passing: it may go better another time.
    """

    def __init__(self, message: str, *, passing: bool = False) -> None:
        super().__init__(message)
        self.passing = passing


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, in the system's order."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(item[4][0]) for item in found))


@dataclass(frozen=True, slots=True)
class Network:
    """The way from names to connections. Tests put others in place of these."""

    resolve: Callable[[str, int], list[str]] = resolve
    is_public: Callable[[str], bool] = is_public
    tls: ssl.SSLContext = field(default_factory=ssl.create_default_context)


@dataclass(frozen=True, slots=True)
class Page:
    """A server's answer."""

    urls: tuple[str, ...]
    """The one that was asked for, and those that redirects led to; the last has the contents."""
    kind: str
    """Content type, without its parameters."""
    charset: str
    """As the server names it; "": it does not."""
    body: bytes


@dataclass(frozen=True, slots=True)
class Fetcher:
    """Gets pages. May be used by several threads."""

    egress: Egress
    max_bytes: int
    """Limit on a page, as sent and after decompression."""
    timeout_s: float
    """For a page with all its redirects."""
    network: Network = field(default_factory=Network)

    def get(self, url: str, seen: list[str]) -> Page:
        """The page at a URL.

        Args:
            url: checked here, as is each URL that a redirect leads to.
            seen: every URL that is asked for is appended, also when it fails.

        Raises:
            AddressRefused: the URL, a redirect's, or an address that a name leads to may not be opened.
            FetchFailed: the server does not answer, or with an error, or with more than it may.
        """
        deadline = time.monotonic() + self.timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            seen.append(url)
            target = self.egress.target(url)
            with self._connected(target, deadline) as line:
                response = line.ask(target)
                if response.status not in REDIRECTS:
                    return self._page(target, response, line, seen)
                location = response.getheader("Location")
            if not location:
                raise FetchFailed(f"{target.url} answered {response.status} without saying where it leads")
            following = urljoin(target.url, location)
            if target.scheme == "https" and following.lower().startswith("http:"):
                raise AddressRefused(f"{target.url} leads from https to http, to {following[:200]}")
            url = following
        raise FetchFailed(f"more than {MAX_REDIRECTS} redirects, the last to {url[:200]}")

    def _connected(self, target: WebAddress, deadline: float) -> _Line:
        """A connection to one of the target's addresses, all of which are checked first. The name is not resolved again."""
        try:
            addresses = self.network.resolve(target.host, target.port)
        except (OSError, UnicodeError) as error:
            raise FetchFailed(f"the host {target.host} is not known ({error})", passing=True) from None
        check_addresses(target.host, addresses, self.network.is_public)
        return _Line(target, addresses, deadline, self.network.tls)

    def _page(self, target: WebAddress, response: HTTPResponse, line: _Line, seen: Sequence[str]) -> Page:
        if response.status != 200:
            passing = response.status >= 500 or response.status in (408, 425, 429)
            raise FetchFailed(f"{target.url} answered {response.status} {response.reason[:100]}", passing=passing)
        encoding = (response.getheader("Content-Encoding") or "identity").strip().lower()
        if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
            raise FetchFailed(f"{target.url} is compressed as {encoding[:40]!r}, which it was not asked for")
        body = line.read(response, self.max_bytes, None if encoding == "identity" else encoding)
        return Page((*seen,), response.headers.get_content_type(), response.headers.get_content_charset() or "", body)


class _Line:
    """One connection for one question, cut at the deadline however slowly bytes trickle in."""

    def __init__(self, target: WebAddress, addresses: Sequence[str], deadline: float, tls: ssl.SSLContext) -> None:
        self._target, self._addresses, self._deadline, self._tls = target, addresses, deadline, tls
        self._socket: socket.socket | None = None
        self._is_cut = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._cut)
        self._timer.daemon = True
        self._http = HTTPConnection(target.host, target.port)  # never connects by itself

    def __enter__(self) -> _Line:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._http.close()
        with self._lock:
            if self._socket is not None:
                self._socket.close()

    def ask(self, target: WebAddress) -> HTTPResponse:
        """The answer's line and headers."""
        try:
            self._http.sock = self._connect()
            self._http.putrequest("GET", target.path, skip_host=True, skip_accept_encoding=True)
            for name, value in {"Host": target.authority, **HEADERS}.items():
                self._http.putheader(name, value)
            self._http.endheaders()
            return self._http.getresponse()
        except (OSError, HTTPException, ValueError) as error:  # ValueError: what http.client makes of malformed answers
            raise self._failure(error) from error

    def read(self, response: HTTPResponse, max_bytes: int, encoding: str | None) -> bytes:
        """The body, decompressed, and read no further than the limit."""
        body, num_read = bytearray(), 0
        unpack = None if encoding is None else _Unpacker(encoding)
        try:
            while num_read <= max_bytes and len(body) <= max_bytes:
                piece = response.read1(BLOCK_BYTES)
                if not piece:
                    break
                num_read += len(piece)
                body += piece if unpack is None else unpack(piece, max_bytes + 1 - len(body))
            else:
                raise FetchFailed(f"{self._target.url} has more than {max_bytes} bytes")
            if self._is_cut:  # a cut line reads like an end
                raise TimeoutError
            if response.length:
                raise FetchFailed(f"{self._target.url} ended {response.length} bytes before its announced length", passing=True)
            if unpack is not None and not unpack.is_whole:
                raise FetchFailed(f"{self._target.url} ended in the middle of its compressed data", passing=True)
        except (OSError, HTTPException, ValueError, zlib.error) as error:
            raise self._failure(error) from error
        return bytes(body)

    def _connect(self) -> socket.socket:
        last: OSError = OSError("no address")
        for address in self._addresses:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            plain = socket.socket(family, socket.SOCK_STREAM)
            try:
                plain.settimeout(left_s)
                plain.connect((address, self._target.port))
                self._hold(plain)
                if self._target.scheme == "http":
                    return plain
                secure = self._tls.wrap_socket(plain, server_hostname=self._target.host)
                self._hold(secure)
                return secure
            except ssl.SSLError:
                plain.close()
                raise
            except OSError as error:
                plain.close()
                last = error
        raise last

    def _hold(self, held: socket.socket) -> None:
        with self._lock:
            self._socket = held
            if self._is_cut:
                raise TimeoutError

    def _cut(self) -> None:
        with self._lock:
            self._is_cut = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it is closed already
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _failure(self, error: Exception) -> FetchFailed:
        if self._is_cut or isinstance(error, TimeoutError):
            return FetchFailed(f"{self._target.url} did not answer in time", passing=True)
        return FetchFailed(f"{self._target.url}: {type(error).__name__}: {str(error)[:200]}", passing=True)


class _Unpacker:
    """Decompresses piece by piece, never more than is asked for. What follows the end of the first stream is left out."""

    def __init__(self, encoding: str) -> None:
        self._deflate = encoding == "deflate"
        self._stream = zlib.decompressobj(zlib.MAX_WBITS if self._deflate else zlib.MAX_WBITS | 16)
        self._begun = False

    @property
    def is_whole(self) -> bool:
        """True at the end of the stream, and where there was nothing."""
        return self._stream.eof or not self._begun

    def __call__(self, piece: bytes, most: int) -> bytes:
        if self._deflate and not self._begun:
            self._begun = True
            with contextlib.suppress(zlib.error):
                return self._stream.decompress(piece, most)
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS)  # some servers send deflate without its head
        self._begun = True
        return b"" if self._stream.eof else self._stream.decompress(self._stream.unconsumed_tail + piece, most)
