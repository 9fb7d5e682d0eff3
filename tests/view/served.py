"""A viewer in a process of its own, as a person starts it."""

from __future__ import annotations

import http.client
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from urllib.parse import urlencode, urlsplit

ROOT = Path(__file__).resolve().parents[2]
START_S = 60


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self):
        return json.loads(self.body)


@dataclass(frozen=True)
class Served:
    """The address of a viewer, with its token."""

    address: str

    @property
    def port(self) -> int:
        return urlsplit(self.address).port or 0

    @property
    def token(self) -> str:
        return urlsplit(self.address).path.strip("/")

    def raw(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, headers={"Host": f"127.0.0.1:{self.port}", **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, name: str, **given) -> Answer:
        return self.raw(f"/{self.token}/api/{name}?{urlencode(given)}")


@contextmanager
def serving(*arguments: str | Path) -> Iterator[Served]:
    """`whet view` with these arguments, until the end of the block."""
    command = [sys.executable, "-u", "-m", "whet", "view", *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda: [lines.put(line.strip()) for line in chain(process.stdout, [""])], daemon=True)
    reader.start()
    try:
        try:
            address = lines.get(timeout=START_S)
        except queue.Empty:
            process.kill()
            raise AssertionError(f"it said nothing in {START_S} s: {process.communicate()[1]}") from None
        assert address, f"it ended: {process.stderr.read()}"
        yield Served(address)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
        reader.join(20)
        process.stdout.close()
        process.stderr.close()
