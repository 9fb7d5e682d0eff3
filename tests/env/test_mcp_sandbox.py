"""Servers of tools in the sandbox: a session has one of its own, reaches nothing else, and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

import pytest

from tests.env.sandbox.conftest import SYSTEM_PYTHON
from tests.env.test_mcp import HERE, ask, factory
from tests.left import Left
from tests.reach import open_to_all
from tests.rollout.scripted import run
from whet.config import ConfigError
from whet.env.build import EnvConfig, build_env_factory
from whet.env.mcp.server import ServerFailed
from whet.env.sandbox import open as opening
from whet.env.sandbox.base import SandboxFailed, SandboxRefused
from whet.env.sandbox.holder import Launch
from whet.env.sandbox.probe import Isolation, attempts, rung_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of this machine need Linux")


@pytest.fixture(params=["namespaces", "landlock"])
def rung(request, monkeypatch):
    """A way to isolate."""
    found = rung_of(request.param, Launch())
    try:
        tried = asyncio.run(attempts(found))
    except SandboxFailed as fault:
        pytest.skip(f"this machine has no {request.param}: {fault}")
    monkeypatch.setattr(opening, "choose", lambda unsafe: Isolation(found, {request.param: tried}))
    return found


@pytest.fixture
def make(rung, tmp_path_factory):
    """Environments with a server in the sandbox, whose program every user may read."""
    here = tmp_path_factory.mktemp("server")
    open_to_all(here)
    program = here / "server.py"
    program.write_text((HERE / "mcp_stdlib.py").read_text())
    program.chmod(0o644)
    python = SYSTEM_PYTHON if rung.name == "landlock" and not os.geteuid() else sys.executable
    return factory(command=[python, "-S", str(program)], sandbox=True)


def test_a_server_in_the_sandbox_reaches_nothing_outside(make, rung, tmp_path, monkeypatch):
    before = Left()
    monkeypatch.setenv("MY_SERVICE_TOKEN", "secret")
    with socket.create_server(("127.0.0.1", 0)) as other:
        secret = tmp_path / f"secret-{other.getsockname()[1]}"
        secret.write_text("secret")
        answers = run(ask(make, ("add", {"a": 1}), ("peek", {"path": str(secret)}), ("variables", {}), ("spawn", {"path": "pids"})))
    assert answers[0] == "2" and answers[3] == "started"
    read, connected, folder, uid = answers[1].split()
    assert read in ("FileNotFoundError", "PermissionError") and connected in ("PermissionError", "ConnectionRefusedError")
    assert uid != "0" and "MY_SERVICE_TOKEN" not in answers[2] and folder != os.getcwd()
    assert opening.chosen(make).rung.name == rung.name, "the run's folder tells of it"
    before.check()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("crash", "failed in the tool crash: MCPError: Connection closed; its last words: out of cheese"),
        ("flood", "failed in the tool flood: MCPError: Connection closed; its last words: it wrote a line of more than 16 MiB"),
    ],
)
def test_what_fails_in_it_is_an_error_of_the_environment_and_leaves_nothing(make, name, words):
    before = Left()
    with pytest.raises(ServerFailed, match=words):
        run(ask(make, (name, {})))
    before.check()


def test_sessions_have_sandboxes_of_their_own(make):
    assert run(ask(make, ("spawn", {"path": "pids"}), ("peek", {"path": "pids"}), in_turns=True))[1].startswith(tuple("0123456789"))
    assert run(ask(make, ("peek", {"path": "pids"})))[0].startswith("FileNotFoundError")


def test_a_machine_that_cannot_isolate_refuses_such_a_server(monkeypatch):
    def choose(unsafe):
        raise SandboxRefused("env.sandbox: nothing on this machine isolates")

    monkeypatch.setattr(opening, "choose", choose)
    for more, words in (
        ({}, "nothing on this machine isolates"),
        ({"kind": "docker", "at": "python"}, "not in those of env.sandbox.kind='docker'"),
    ):
        entry = {"name": "mcp", "command": [sys.executable], "sandbox": True}
        with pytest.raises(ConfigError, match=words):
            build_env_factory(EnvConfig(name="tools", tools=[entry], sandbox=more))
