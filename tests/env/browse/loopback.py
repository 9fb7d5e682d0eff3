"""A server on loopback that answers with given bytes, and a network whose names lead to it."""

import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress

from whet.env.browse.address import Egress
from whet.env.browse.fetch import Fetcher, Network

Answer = bytes | Callable[[socket.socket], None]


class Loopback:
    """Answers by path, one thread a connection.

    Args:
        answers: bytes, or a function that writes to the connection until it is done.
        tls: for https; None: http.
    """

    def __init__(self, answers: dict[str, Answer], tls: ssl.SSLContext | None = None) -> None:
        self.answers, self._tls = answers, tls
        self.asked: list[bytes] = []
        self.stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._answer, args=(line,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _answer(self, line: socket.socket) -> None:
        with line, suppress(OSError):
            line.settimeout(20)
            if self._tls is None:
                self._speak(line)
            else:
                with self._tls.wrap_socket(line, server_side=True) as secure:
                    self._speak(secure)

    def _speak(self, line: socket.socket) -> None:
        with suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                piece = line.recv(65536)
                if not piece:
                    return
                head += piece
            self.asked.append(head)
            answer = self.answers[head.split()[1].decode()]
            if isinstance(answer, bytes):
                line.sendall(answer)
            else:
                answer(line)

    def close(self) -> None:
        self.stopped.set()
        self._listener.close()
        for thread in self._threads:
            thread.join(20)


def page(body: bytes, *headers: str, status: str = "200 OK", kind: str = "text/html; charset=utf-8") -> bytes:
    """An answer with its length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", *headers]
    if not any(line.lower().startswith("content-length") for line in lines):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


def leads_to(location: str) -> bytes:
    return page(b"", f"Location: {location}", status="302 Found")


def fetcher(port: int, names: dict[str, list[list[str]]], *, max_bytes: int = 100_000, timeout_s: float = 20.0) -> Fetcher:
    """A fetcher for which 127.0.0.1 alone of the private addresses is public.

    Args:
        port: of the loopback server.
        names: what each name leads to the first time, the second time and so on; the last stays.
    """

    def resolve(host: str, port: int) -> list[str]:
        answers = names.get(host, [[host]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    network = Network(resolve, lambda address: address in ("127.0.0.1", "127.0.0.2"))
    return Fetcher(Egress(("*",), (80, 443, port)), max_bytes, timeout_s, network)
