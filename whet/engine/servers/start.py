"""Starts servers, and connects to servers that run already."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from whet.engine.base import EngineFailed
from whet.engine.embedded.stops import Decode
from whet.engine.servers import guard
from whet.engine.servers.devices import VISIBLE, plain_names
from whet.engine.servers.http import KEY, HttpServer
from whet.engine.servers.member import ServerMember, ServerProcess
from whet.engine.servers.wire import Wire
from whet.engine.workers.launch import LocalWorker
from whet.runfolder.child_environment import child_environment
from whet.runfolder.stacks import spied

LOOPBACK = "127.0.0.1"
POLL_S = 0.2
END_S = 15.0
"""For a server to end by itself."""
ASK_S = 10.0
"""For a server to answer a question about itself."""
TIMEOUT = "engine.pool.start_timeout_s"
RAISED = re.compile(r"(?<![`\w.'])[\w.]*(Error|Exception): .+")
"""An exception's last line, behind whatever a log puts before it."""
CONSEQUENCE = re.compile(r"Engine core initialization failed|WorkerProc initialization failed|See root cause")
"""Exceptions of processes that wait for the one that failed."""


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address that a server listens on, and its key."""

    port: int
    host: str = LOOPBACK
    key: str | None = field(default=None, repr=False)
    """A key that its routes ask for; None: none."""

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


class ServerKind(Protocol):
    """A kind of server: its command line, and its routes."""

    name: str
    """As in `engine.name`."""
    title: str
    """In messages: vLLM, SGLang."""
    own_routes: bool
    """Such servers take a broadcast of weights by routes of their own (`ServerBroadcastTicket`)."""

    def command(self, folder: Path, at: ServerAddress, dtype: str, args: Mapping[str, Any]) -> list[str]:
        """Module and arguments of a server.

        Args:
            folder: the model's.
            at: address that it listens on.
            dtype: type of its computation, unless `args` has one.
            args: further arguments by the server's names.

        Raises:
            ValueError: if one of them is whet's to set.
        """
        ...

    def environment(self, at: ServerAddress) -> dict[str, str]:
        """Variables of the process of a server that listens on an address."""
        ...

    def why(self, lines: Sequence[str]) -> str:
        """The reason of a server's end, from its last lines, and what to do where that is known."""
        ...

    def connect(self, server: HttpServer, key: str | None, direct_names: frozenset[str] | None) -> Wire:
        """The routes of a server that answers.

        Args:
            server: its address.
            key: its key; None: none.
            direct_names: names of the model's weights, if files call and cut them as the model does; None: they do not.

        Raises:
            EngineFailed: if it lacks something that whet needs; the text says what to do.
        """
        ...

    def connect_fixed(self, server: HttpServer, key: str | None) -> Wire:
        """The routes of a server whose weights stay as they are: none that change or prove them are needed.

        Raises:
            EngineFailed: as `connect`.
        """
        ...


def command_line(kind: ServerKind, every: Mapping[str, Any], fixed: set[str], args: Mapping[str, Any]) -> list[str]:
    """Arguments of a server.

    Args:
        kind: the kind of server.
        every: whet's own arguments; those outside `fixed` may be another.
        fixed: names that whet sets.
        args: the user's, by the server's names.

    Raises:
        ValueError: if one of them is whet's to set.
    """
    named = plain_names(args)
    if taken := sorted(fixed & named.keys()):
        raise ValueError(f"engine.{kind.name}.args: {', '.join(taken)} is set by whet; leave it out")
    return [word for name, value in {**every, **named}.items() for word in flags(name, value)]


def flags(name: str, value: Any) -> list[str]:
    """An argument of a command line; true: a switch."""
    flag = "--" + name.replace("_", "-")
    match value:
        case True:
            return [flag]
        case False:
            return ["--no-" + flag[2:]]
        case dict():
            return [flag, json.dumps(value)]
        case list():
            return [flag, *map(str, value)]
        case _:
            return [flag, str(value)]


class StartedProcess(ServerProcess, Protocol):
    """The process of a server that was started, wherever it runs."""

    @property
    def ended(self) -> str | None:
        """The manner of its end; None: it runs."""
        ...

    def last_lines(self) -> list[str]:
        """Its last lines of output, the newest last."""
        ...


class ServerHost(Protocol):
    """A machine that a server is started on."""

    @property
    def title(self) -> str:
        """Its name in messages."""
        ...

    @property
    def address(self) -> str:
        """Address on which the server listens, and is reached from here; `LOOPBACK`: it is this machine."""
        ...

    def find(self, program: str) -> str | None:
        """Path of a program there; None: there is none."""
        ...

    def free_port(self) -> int:
        """A port of the address on which nobody listens."""
        ...

    def lacks(self, path: Path) -> bool:
        """True if a file or folder of this machine is not there."""
        ...

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> StartedProcess:
        """Start a server.

        Args:
            name: before each line of its output.
            command: a Python there, and its arguments.
            environment: variables in addition to those that any process of a run has.

        Raises:
            EngineFailed: if it cannot be started.
        """
        ...

    def close(self) -> None:
        """Give up a host on which no server runs."""
        ...


ServerHosts = Callable[[str, threading.Event], ServerHost]
"""Finds the host of a server, by its name, each time that it is started. Raises EngineFailed if there is none, or the event is set: nobody
waits for it any more."""


@dataclass(frozen=True, slots=True)
class LocalHost:
    """This machine."""

    devices: tuple[str, ...] = ()
    """GPUs of the server; empty: those of this process."""
    title = "this machine"
    address = LOOPBACK

    def find(self, program: str) -> str | None:
        return shutil.which(program)

    def free_port(self) -> int:
        return free_port()

    def lacks(self, path: Path) -> bool:
        return not path.exists()

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> StartedServer:
        devices = {VISIBLE: ",".join(self.devices)} if self.devices else {}
        return StartedServer(name, command, {**environment, **devices})

    def close(self) -> None:
        pass


def local_host(name: str, given_up: threading.Event) -> LocalHost:
    """This machine, with the GPUs of this process, for every server (`ServerHosts`)."""
    return LocalHost()


class StartedServer:
    """A server's process, and its engine's.

    Args:
        name: before each line of its output.
        command: a Python, and its arguments.
        environment: variables in addition to those that any process of a run has.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        guarded = [command[0], guard.__file__, *command]
        child = subprocess.Popen(
            guarded, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=child_environment(environment)
        )
        self._child, self._worker = child, LocalWorker(name, child)

    @property
    def ended(self) -> str | None:
        """The manner of its end; None: it runs."""
        status = self._worker.ended(0)
        return None if status is None else status.words

    def last_lines(self) -> list[str]:
        return self._worker.last_lines()

    def stacks(self) -> str:
        return "" if self._child.poll() is not None else spied(self._child.pid)

    def kill(self) -> None:
        """End it, and its engine. Any thread."""
        if self._child.stdin is not None:
            self._child.stdin.close()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def stop(self) -> None:
        self._worker.mute()  # its last words are of its own threads
        self.kill()


@dataclass(frozen=True, slots=True)
class ServerStarter:
    """Starts a server, again and again. Its `__call__` may run in any thread."""

    kind: ServerKind
    name: str
    python: str
    folder: Path
    """The model's."""
    dtype: str
    args: Mapping[str, Any]
    decode: Decode
    direct_names: frozenset[str] | None
    """As in `ServerKind.connect`."""
    timeout_s: float
    """For the server to be ready."""
    hosts: ServerHosts = local_host
    """Finds the machine that it is started on."""
    versions: Path | None = None
    """Folder of the versions that it is to load; None: weights come over the network."""

    def __call__(self, given_up: threading.Event) -> ServerMember:
        host = self.hosts(self.name, given_up)
        try:
            self._check_folders(host)
            python = host.find(self.python)
            if python is None:
                there = f"there is no {self.python} on {host.title}; name the Python of an environment that has {self.kind.title}"
                raise EngineFailed(f"engine.python: {there}")
            key = None if host.address == LOOPBACK else secrets.token_urlsafe(32)
            at = ServerAddress(host.free_port(), host.address, key)
            command = self.kind.command(self.folder.absolute(), at, self.dtype, self.args)
            process = host.start(self.name, [python, "-m", *command], self.kind.environment(at))
        except BaseException:  # raised again, whatever it is: nobody else ends the host
            host.close()
            raise
        try:
            server = HttpServer(self.name, at.url, at.key)
            self._await_ready(server.url, process, given_up)
            return ServerMember(server, self.kind.connect(server, at.key, self.direct_names), self.decode, process)
        except BaseException:
            process.kill()
            raise

    def _check_folders(self, host: ServerHost) -> None:
        """Raises EngineFailed if the host does not have the folders of the model and of new versions as this machine has them."""
        if host.lacks(self.folder.absolute()):
            raise EngineFailed(
                f"{self.name}: {host.title} has no {self.folder.absolute()}, the model's folder here: keep it on a file system that all "
                "nodes have under one path (model.path, or HF_HOME for models of the hub)"
            )
        if self.versions is None or host.address == LOOPBACK:
            return
        self.versions.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=self.versions, prefix=".seen-") as here:  # a new file: another machine may have a folder of that name
            if host.lacks(Path(here.name)):
                raise EngineFailed(
                    f"{self.name}: {host.title} does not see what is written to {self.versions}, where new weights go: set run_dir or "
                    "sync.folder to a folder on a file system that all nodes have under one path, or sync.transport=broadcast"
                )

    def _await_ready(self, url: str, process: StartedProcess, given_up: threading.Event) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not answers(url + "/health"):
            if (how := process.ended) is not None:
                raise EngineFailed(f"{self.name} did not start ({how}): {self.kind.why(process.last_lines())}")
            if time.monotonic() > deadline:
                last = " | ".join(process.last_lines()[-3:])
                raise EngineFailed(f"{self.name} was not ready within {self.timeout_s:g} s ({TIMEOUT}); its last lines: {last}")
            if given_up.wait(POLL_S):
                raise EngineFailed(f"{self.name}: the engine was closed")


@dataclass(frozen=True, slots=True)
class ServerAt:
    """Connects to a server that somebody else started, again and again. Its `__call__` may run in any thread."""

    kind: ServerKind
    name: str
    url: str
    decode: Decode
    direct_names: frozenset[str] | None
    timeout_s: float

    def __call__(self, given_up: threading.Event) -> ServerMember:
        await_answer(self.name, self.url, "engine.urls", self.timeout_s, given_up)
        key = os.environ.get(KEY)
        server = HttpServer(self.name, self.url, key)
        return ServerMember(server, self.kind.connect(server, key, self.direct_names), self.decode)


def await_answer(name: str, url: str, setting: str, timeout_s: float, given_up: threading.Event) -> None:
    """Wait until a server that somebody else started answers.

    Raises:
        EngineFailed: if it does not, or nobody waits any more.
    """
    deadline = time.monotonic() + timeout_s
    while not answers(url.rstrip("/") + "/health"):
        if time.monotonic() > deadline:
            raise EngineFailed(f"{name}: {url} ({setting}) did not answer within {timeout_s:g} s ({TIMEOUT})")
        if given_up.wait(POLL_S):
            raise EngineFailed(f"{name}: the engine was closed")


def ask(name: str, url: str, key: str | None, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON of a route.

    Raises:
        EngineFailed: if it has none.
    """
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with _no_proxy().open(request, timeout=ASK_S) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        hint = f"; set the server's key in {KEY}" if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403) else ""
        raise EngineFailed(f"{name}: {url}: {error}{hint}") from error


def answers(url: str) -> bool:
    try:
        with _no_proxy().open(url, timeout=ASK_S) as answer:
            return answer.status == 200
    except OSError:
        return False


def _no_proxy() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


def reason(kind: ServerKind, lines: Sequence[str], module: str) -> str:
    """The reason of a server's end that any kind may have."""
    text = "\n".join(lines)
    if re.search(rf"No module named '?{module}\b", text):
        return f"engine.python has no {kind.title}; name the Python of the environment that has it"
    if found := re.search(r"unrecognized arguments: (.*)", text):
        names = [word for word in found[1].split() if word.startswith("--")]
        return f"engine.{kind.name}.args: the installed {kind.title} has no {', '.join(names)}{nearest(names, text)}"
    raised = [match[0].strip() for line in lines if (match := RAISED.search(line)) is not None]
    causes = list(dict.fromkeys(words for words in raised if not CONSEQUENCE.search(words)))
    errors = [line for line in lines if re.search(r"Error|error:", line)]
    return " | ".join(causes[:2] or (errors or list(lines))[-3:])


def nearest(names: Sequence[str], text: str) -> str:
    known = sorted(set(re.findall(r"--[a-z][a-z0-9-]+", text)) - set(names))
    close = [each for name in names for each in get_close_matches(name, known, 1)]
    return f"; it has {', '.join(close)}" if close else ""
