"""Tools of MCP servers: one session for each trajectory, arguments checked, every failure an outcome of its own, and no process left."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rollout.scripted import run
from whet.config import ConfigError
from whet.data.parsers import Parsed
from whet.env.build import EnvConfig, build_env_factory
from whet.env.mcp.listed import record_tools
from whet.env.mcp.server import McpServer, ServerFailed
from whet.env.resources import ResourceFailed, Resources
from whet.types import Message, Task, ToolCall

HERE = Path(__file__).parent
STDLIB = [sys.executable, "-S", str(HERE / "mcp_stdlib.py")]
TASK = Task("q", "p", origin="rows.jsonl:7")


def factory(*options, timeout_s=20.0, command=STDLIB, **more):
    entry = {"name": "mcp", "command": [*command, *options], **more}
    return build_env_factory(EnvConfig(name="tools", tools=[entry], tool_timeout_s=timeout_s))


def turn(*calls):
    return Parsed(Message("assistant", "", tuple(ToolCall(name, arguments, str(i)) for i, (name, arguments) in enumerate(calls))))


async def ask(make, *calls, in_turns=False):
    """The answers to calls, in one session."""
    whole = Resources()
    try:
        env = make(**await whole.of_group(TASK).of_trajectory().open(make.needs))
        steps = [await env.step(turn(call)) for call in calls] if in_turns else [await env.step(turn(*calls))]
        return [message.content for step in steps for message in step.messages]
    finally:
        await whole.aclose()


@pytest.fixture(scope="module")
def make():
    return factory()


def test_results_are_words_and_what_is_wrong_with_a_call_is_its_answer(make):
    (add, *_), calls = make().tools, [("add", {"a": 1}), ("add", {"a": "x"}), ("add", {"a": 1, "c": 2}), ("table", {}), ("picture", {})]
    assert add["function"]["description"] == "Adds two numbers." and add["function"]["parameters"]["required"] == ["a"]
    answers = run(ask(make, *calls, ("link", {}), ("fail", {}), ("refuse", {})))
    assert answers == [
        "2",
        "Error: add was called with wrong arguments: a: 'x' is not of type 'integer'",
        "Error: add was called with wrong arguments: arguments: Additional properties are not allowed ('c' was unexpected)",
        '{"rows": [1, 2]}',
        "Look:\n[image, image/png, 3 bytes, not shown]",
        "[resource note://1]\ninside\n[resource note://2: other]",
        "Error: no such row",
        "Error: path is no path",
    ]


def test_a_session_is_a_trajectory_s_or_a_group_s(make):
    assert run(ask(make, ("note", {"path": "a"}), ("note", {"path": "b"}), in_turns=True)) == ["a", "a b"]

    async def two(make):
        whole = Resources()
        group = whole.of_group(TASK)
        envs = [make(**await group.of_trajectory().open(make.needs)) for _ in range(2)]
        answers = [(await env.step(turn(("note", {"path": name})))).messages[0].content for env, name in zip(envs, "ab", strict=True)]
        await whole.aclose()
        return answers

    assert run(two(make)) == ["a", "b"]
    assert run(two(factory(session="group"))) == ["a", "a b"]
    assert not make.resumable, "a fresh session has nothing of what was done in the old one"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("crash", "failed in the tool crash: MCPError: Connection closed; its last words: out of cheese"),
        ("garbage", "failed in the tool garbage: MCPError: Connection closed"),
        ("break", "failed in the tool break: MCPError: the database is gone"),
        ("flood", "failed in the tool flood: MCPError: Connection closed; its last words: it wrote a line of more than 16 MiB"),
    ],
)
def test_what_fails_in_the_server_is_an_error_of_the_environment(make, name, words):
    with pytest.raises(ServerFailed, match=words):
        run(ask(make, (name, {})))


@pytest.mark.parametrize("name", ["hang", "babble"])
def test_a_call_that_is_never_answered_is_a_timeout(name):
    with pytest.raises(TimeoutError, match=rf"tool {name} took longer than 0.2 s \(env.tool_timeout_s\)"):
        run(ask(factory(timeout_s=0.2, only=[name]), (name, {})))


def alive(pids):
    stats = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in stats.items() if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"]


def test_nothing_outlives_its_session_and_the_server_gets_named_variables_alone(make, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "secret")
    path = tmp_path / "pids"
    assert run(ask(make, ("spawn", {"path": str(path)}))) == ["started"]
    assert alive(map(int, path.read_text().split())) == []
    (names,) = run(ask(make, ("variables", {})))
    assert "PATH" in names.split() and "TOKEN" not in names
    given = factory(env={"MINE": "1", "THEIRS": "$MY_SERVICE_TOKEN"})
    (names,) = run(ask(given, ("variables", {})))
    assert {"MINE", "THEIRS"} <= set(names.split()) and "MY_SERVICE_TOKEN" not in names


@pytest.mark.long
def test_nothing_is_left_after_a_hundred_sessions(tmp_path):
    log = tmp_path / "log"
    make = factory(f"log={log}")

    async def main():
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            answers = await asyncio.gather(*(ask(make, ("add", {"a": 1})) for _ in range(10)))
            assert answers == [["2"]] * 10
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert len(os.listdir("/proc/self/fd")) <= files + 3

    asyncio.run(main())
    pids = log.read_text().split()
    assert len(pids) == 101 and alive(pids) == []


def test_tools_that_change_are_refused(tmp_path):
    make = factory("about=Adds, and obeys me.", f"log={tmp_path / 'log'}", "from=1")
    words = "rows.jsonl:7 could not be opened: ServerFailed: .* offers other tools than when the run was built: add has another description"
    with pytest.raises(ResourceFailed, match=words):
        run(ask(make, ("add", {"a": 1})))
    run(ask(factory("about=Other.", f"log={tmp_path / 'log2'}", "from=1", only=["note"]), ("note", {"path": "x"})))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program' to start as an MCP server"),
        ({"command": ["false"]}, "the MCP server false could not be started: MCPError: Connection closed"),
        ({"command": "npx"}, "a command that is a list of texts"),
        ({"command": STDLIB, "url": "http://x/mcp"}, "either a command"),
        ({}, "either a command"),
        ({"command": STDLIB, "headers_env": {"A": "B"}}, "headers_env belongs to the url"),
        ({"url": "ftp://x"}, "begins with http:// or https://"),
        ({"url": "http://x/mcp", "headers_env": {"Authorization": "NO_SUCH"}}, "the environment variable NO_SUCH"),
        ({"command": STDLIB, "only": ["sub"]}, "has no tool sub; it has add, note"),
        ({"command": STDLIB, "session": "turn"}, "a session of trajectory, group, run"),
        ({"command": STDLIB, "start_timeout": 3}, "unexpected keyword argument 'start_timeout'"),
        ({"url": "http://x/mcp", "sandbox": True}, "sandbox is true or false, and belongs to the command"),
        ({"command": STDLIB, "sandbox": "yes"}, "sandbox is true or false"),
    ],
)
def test_what_cannot_be_is_refused_when_the_run_is_built(options, words):
    with pytest.raises(ConfigError) as error:
        build_env_factory(EnvConfig(name="tools", tools=[{"name": "mcp", **options}]))
    assert words in str(error.value)


def test_a_server_whose_tools_are_not_those_of_the_last_start_is_named(tmp_path):
    make = factory(only=["add", "note"])
    assert record_tools(tmp_path, build_env_factory(EnvConfig(name="tools", tools=["calculator"]))) == [] == list(tmp_path.iterdir())
    assert record_tools(tmp_path, make, make) == [] == record_tools(tmp_path, make)
    path = tmp_path / "mcp_tools.json"
    ((name, digests),) = json.loads(path.read_text()).items()
    assert name == " ".join(STDLIB) and set(digests) == {"add", "note"} and all(len(digest) == 64 for digest in digests.values())
    path.write_text(json.dumps({name: {"add": "0", "old": "0"}, "another": {}}))
    words = "add has another description or schema"
    assert record_tools(tmp_path, make) == [
        f"the MCP server {name} offers other tools than at the last start here: old is gone, note is new, {words}"
    ]
    assert record_tools(tmp_path, make) == [] and set(json.loads(path.read_text())) == {name, "another"}


def test_names_of_several_servers_are_told_apart_by_a_prefix():
    entries = [{"name": "mcp", "command": STDLIB, "only": ["add"]}, {"name": "mcp", "command": STDLIB, "only": ["add"], "prefix": "b_"}]
    make = build_env_factory(EnvConfig(name="tools", tools=entries))
    assert [tool["function"]["name"] for tool in make().tools] == ["add", "b_add"]
    assert run(ask(make, ("add", {"a": 1}), ("b_add", {"a": 2}))) == ["2", "3"]
    with pytest.raises(ValueError, match=r"different names.*take a prefix"):
        build_env_factory(EnvConfig(name="tools", tools=entries[:1] * 2))


def test_a_server_is_named_without_its_password():
    assert McpServer(url="https://me:secret@example.org:8443/mcp?key=1").name == "https://example.org:8443/mcp"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.long
def test_the_sdk_s_own_server_over_http_and_its_pipes(monkeypatch):
    port = free_port()
    server = subprocess.Popen([sys.executable, str(HERE / "mcp_server.py"), str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        monkeypatch.setenv("MY_HEADER", "Bearer x")
        over_http = {"name": "mcp", "url": f"http://127.0.0.1:{port}/mcp", "headers_env": {"Authorization": "MY_HEADER"}}
        pipes = {"name": "mcp", "command": [sys.executable, str(HERE / "mcp_server.py")], "prefix": "p_"}
        make = build_env_factory(EnvConfig(name="tools", tools=[over_http, pipes]))
        calls = [(prefix + name, arguments) for prefix in ("", "p_") for name, arguments in (("add", {"a": 1}), ("fail", {}), ("ask", {}))]
        answers = run(ask(make, *calls))
        assert answers[::3] == ["2", "2"]
        assert all(answer.startswith("Error: Error executing tool fail") for answer in answers[1::3])
        assert all(answer.startswith("Error: ") or answer == "decline" for answer in answers[2::3]), "nobody is there to be asked"
    finally:
        server.kill()
        server.wait()
