"""Starts servers, and connects to servers that run already."""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Protocol

from whet.engine.base import EngineFailed
from whet.engine.embedded.stops import Decode
from whet.engine.servers.devices import plain_names
from whet.engine.servers.hosts import LOOPBACK, ProcessesOfNodes, ServerHost, ServerHosts, StartedProcess, local_host
from whet.engine.servers.http import KEY, HttpServer
from whet.engine.servers.member import ServerMember
from whet.engine.servers.wire import Wire

POLL_S = 0.2
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


@dataclass(frozen=True, slots=True)
class ServerNode:
    """One of the nodes of a server that computes on several, a process on each."""

    rank: int
    """Number of the node; the first, 0, answers requests."""
    address: str
    """Address by which the other nodes reach it."""
    meeting: ServerAddress
    """Address at which all processes meet; on the first node."""
    seed: int
    """Seed of the noise, the same for all nodes of a server."""


class ServerKind(Protocol):
    """A kind of server: its command line, and its routes."""

    name: str
    """As in `engine.name`."""
    title: str
    """In messages: vLLM, SGLang."""
    own_routes: bool
    """Such servers take a broadcast of weights by routes of their own (`ServerBroadcastTicket`)."""

    def command(
        self, folder: Path, at: ServerAddress, dtype: str, args: Mapping[str, Any], node: ServerNode | None = None
    ) -> list[str]:
        """Module and arguments of a server's process.

        Args:
            folder: the model's.
            at: address that it listens on.
            dtype: type of its computation, unless `args` has one.
            args: further arguments by the server's names.
            node: node of the process, of a server on several; None: it is the server's only one.

        Raises:
            ValueError: if one of them is whet's to set.
        """
        ...

    def environment(self, at: ServerAddress, node: ServerNode | None = None) -> dict[str, str]:
        """Variables of the process of a server that listens on an address; `node` as in `command`."""
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
    """Finds the machine that it is started on; each of its machines, if there are several."""
    versions: Path | None = None
    """Folder of the versions that it is to load; None: weights come over the network."""
    num_nodes: int = 1

    def __call__(self, given_up: threading.Event) -> ServerMember:
        hosts: list[ServerHost] = []
        try:
            for name in self._process_names:
                hosts.append(self.hosts(name, given_up))
                self._check_folders(hosts[-1])
            at, process = self._started(hosts)
        except BaseException:  # raised again, whatever it is: nobody else ends the hosts
            for host in hosts:
                host.close()
            raise
        try:
            server = HttpServer(self.name, at.url, at.key)
            self._await_ready(server.url, process, given_up)
            return ServerMember(server, self.kind.connect(server, at.key, self.direct_names), self.decode, process)
        except BaseException:  # likewise
            process.kill()
            raise

    @property
    def _process_names(self) -> list[str]:
        return [self.name, *(f"{self.name} node {rank}" for rank in range(1, self.num_nodes))]

    def _started(self, hosts: Sequence[ServerHost]) -> tuple[ServerAddress, StartedProcess]:
        """Start a process on each node. The first one's address, and all as one."""
        head = hosts[0]
        key = None if head.address == LOOPBACK else secrets.token_urlsafe(32)
        addresses = [ServerAddress(host.free_port(host.address), host.address, key) for host in hosts]
        nodes: list[ServerNode | None] = [None]
        if len(hosts) > 1:
            meeting, seed = ServerAddress(head.free_port(head.node_address), head.node_address), secrets.randbelow(2**31)
            nodes = [ServerNode(rank, host.node_address, meeting, seed) for rank, host in enumerate(hosts)]
        processes: list[StartedProcess] = []
        try:
            for name, host, at, node in zip(self._process_names, hosts, addresses, nodes, strict=True):
                python = host.find(self.python)
                if python is None:
                    there = f"there is no {self.python} on {host.title}; name the Python of an environment that has {self.kind.title}"
                    raise EngineFailed(f"engine.python: {there}")
                command = self.kind.command(self.folder.absolute(), at, self.dtype, self.args, node)
                processes.append(host.start(name, [python, "-m", *command], self.kind.environment(at, node)))
        except BaseException:  # raised again, whatever it is: nobody else ends what has started
            for process in processes:
                process.kill()
            raise
        return addresses[0], processes[0] if len(processes) == 1 else ProcessesOfNodes(processes)

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
