"""Starts vLLM servers and connects to servers that run already."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from whet.engine.base import EngineFailed
from whet.engine.embedded.stops import Decode
from whet.engine.vllm import guard
from whet.engine.vllm.http import KEY, HttpServer
from whet.engine.vllm.member import Served, VllmMember
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
SERVER = "vllm.entrypoints.openai.api_server"
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""Development routes are those of weight updates: the server listens on this machine alone."""
OWN_ARGS = {
    "logprobs_mode": "processed_logprobs",
    "enable_scale_out": True,
    "generation_config": "vllm",
    "uvicorn_log_level": "warning",
    "weight_transfer_config": {"backend": "whet"},
    "worker_extension_cls": "whet_vllm.WorkerExtension",
}
"""Arguments without which log-probs, tokens or weights would be others than whet counts on."""
FIXED = {"model", "host", "port", *OWN_ARGS}
NEEDED = {
    "/inference/v1/generate": "start it with --enable-scale-out",
    "/pause": "start it with VLLM_SERVER_DEV_MODE=1 in its environment, reachable for trusted machines alone",
}
MISSING_PLUGIN = re.compile(r"No module named 'whet_vllm'|Invalid weight transfer backend|whet.* is not registered")


def arguments(folder: Path, port: int, dtype: str, args: Mapping[str, Any]) -> list[str]:
    """Command line of a server.

    Args:
        folder: the model's.
        port: port on this machine.
        dtype: type of its computation, unless `args` has one.
        args: further arguments by vLLM's names.

    Raises:
        ValueError: if one of them is whet's to set.
    """
    named = {name.replace("-", "_").lstrip("_"): value for name, value in args.items()}
    if taken := sorted(FIXED & named.keys()):
        raise ValueError(f"engine.vllm.args: {', '.join(taken)} is set by whet; leave it out")
    every = {"model": str(folder), "host": LOOPBACK, "port": port, "dtype": dtype, **OWN_ARGS, **named}
    return [word for name, value in every.items() for word in _words(name, value)]


def _words(name: str, value: Any) -> list[str]:
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


class StartedServer:
    """A server's process, and its engine's.

    Args:
        name: before each line of its output.
        python: of vLLM's environment.
        args: command line of the server. It has the `VLLM_` variables of this process.
    """

    def __init__(self, name: str, python: str, args: Sequence[str]) -> None:
        own = {each: value for each, value in os.environ.items() if each.startswith("VLLM_")}
        command = [python, guard.__file__, python, "-m", SERVER, *args]
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=child_environment(ENVIRONMENT | own)
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
class VllmStarter:
    """Starts a vLLM server of this machine, again and again. Its `__call__` may run in any thread."""

    name: str
    python: str
    folder: Path
    """The model's."""
    dtype: str
    args: Mapping[str, Any]
    decode: Decode
    direct_names: frozenset[str] | None
    """As in `VllmMember`."""
    timeout_s: float
    """For the server to be ready."""

    def __call__(self, given_up: threading.Event) -> VllmMember:
        python = shutil.which(self.python)
        if python is None:
            raise EngineFailed(f"engine.vllm.python: there is no {self.python}; name the Python of an environment with vLLM and whet-vllm")
        port = free_port()
        process = StartedServer(self.name, python, arguments(self.folder, port, self.dtype, self.args))
        try:
            url = f"http://{LOOPBACK}:{port}"
            self._await_ready(url, process, given_up)
            return connect(HttpServer(self.name, url), None, self.decode, self.direct_names, process)
        except BaseException:
            process.kill()
            raise

    def _await_ready(self, url: str, process: StartedServer, given_up: threading.Event) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not answers(url + "/health"):
            if (how := process.ended) is not None:
                raise EngineFailed(f"{self.name} did not start ({how}): {why(process.last_lines())}")
            if time.monotonic() > deadline:
                last = " | ".join(process.last_lines()[-3:])
                raise EngineFailed(f"{self.name} was not ready within {self.timeout_s:g} s ({TIMEOUT}); its last lines: {last}")
            if given_up.wait(POLL_S):
                raise EngineFailed(f"{self.name}: the engine was closed")


@dataclass(frozen=True, slots=True)
class ServerAt:
    """Connects to a server that somebody else started, again and again. Its `__call__` may run in any thread."""

    name: str
    url: str
    decode: Decode
    direct_names: frozenset[str] | None
    timeout_s: float

    def __call__(self, given_up: threading.Event) -> VllmMember:
        deadline = time.monotonic() + self.timeout_s
        while not answers(self.url.rstrip("/") + "/health"):
            if time.monotonic() > deadline:
                raise EngineFailed(f"{self.name}: {self.url} (engine.urls) did not answer within {self.timeout_s:g} s ({TIMEOUT})")
            if given_up.wait(POLL_S):
                raise EngineFailed(f"{self.name}: the engine was closed")
        key = os.environ.get(KEY)
        return connect(HttpServer(self.name, self.url, key), key, self.decode, self.direct_names, None)


def connect(
    server: HttpServer, key: str | None, decode: Decode, direct_names: frozenset[str] | None, process: StartedServer | None
) -> VllmMember:
    """A member for a server that answers.

    Raises:
        EngineFailed: if it lacks something that whet needs; the text says what to do.
    """
    name = server.name
    paths = ask(name, server.url + "/openapi.json", key).get("paths", {})
    for route, remedy in NEEDED.items():
        if route not in paths:
            raise EngineFailed(f"{name}: the server at {server.url} has no route {route}; {remedy}")
    models = ask(name, server.url + "/v1/models", key).get("data") or [{}]
    served = Served(
        model=str(models[0].get("id")),
        max_tokens=int(models[0].get("max_model_len") or 0),
        world_size=int(ask(name, server.url + "/get_world_size", key)["world_size"]),
        label=str(ask(name, server.url + "/weight_info", key)["weight_version"]),
        has_plugin=has_plugin(server.url, key),
    )
    return VllmMember(server, served, decode, direct_names, process)


def has_plugin(url: str, key: str | None) -> bool:
    """True if every process of the server takes tickets: it was started with `whet-vllm`."""
    try:
        answer = ask("", url + "/collective_rpc", key, {"method": "whet_takes_tickets"})
    except EngineFailed:  # no such method
        return False
    return all(answer.get("results") or [False])


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


def why(lines: Sequence[str]) -> str:
    """The reason of a server's end, from its last lines, and what to do where that is known."""
    text = "\n".join(lines)
    if MISSING_PLUGIN.search(text):
        return "vLLM's environment lacks the package whet-vllm; install it there"
    if "No module named 'vllm'" in text or "No module named vllm" in text:
        return "engine.vllm.python has no vLLM; name the Python of the environment that has it"
    if found := re.search(r"unrecognized arguments: (.*)", text):
        names = [word for word in found[1].split() if word.startswith("--")]
        return f"engine.vllm.args: the installed vLLM has no {', '.join(names)}{nearest(names, text)}"
    errors = [line for line in lines if re.search(r"Error|error:", line)]
    return " | ".join((errors or list(lines))[-3:])


def nearest(names: Sequence[str], text: str) -> str:
    known = sorted(set(re.findall(r"--[a-z][a-z0-9-]+", text)) - set(names))
    close = [each for name in names for each in get_close_matches(name, known, 1)]
    return f"; it has {', '.join(close)}" if close else ""
