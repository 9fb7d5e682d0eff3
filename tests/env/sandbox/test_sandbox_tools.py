"""Tools over a sandbox, programs that live on, and remote sandboxes against what speaks as they do."""

import asyncio
import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from tests.env.sandbox.conftest import opened
from whet.data.parsers import Parsed
from whet.env.build import EnvConfig, build_env_factory
from whet.env.resources import Resources
from whet.env.sandbox.base import PathRefused, SandboxFailed
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.docker import DockerSandbox
from whet.env.sandbox.fusion import FusionSandbox
from whet.types import Message, Task, ToolCall

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes of this machine need Linux")


def test_tools_share_the_trajectory_s_folder_and_answer_what_the_model_did_wrong():
    calls = [
        ("python", {"code": "open('a.txt', 'w').write('one two'); print(6 * 7)"}),
        ("shell", {"command": "cat a.txt; exit 3"}),
        ("files", {"action": "replace", "path": "a.txt", "old": "two", "text": "three"}),
        ("files", {"action": "read", "path": "a.txt"}),
        ("files", {"action": "read", "path": "../../etc/passwd"}),
        ("python", {"code": "1 / 0"}),
        ("python", {"code": "while True: pass"}),
    ]
    config = EnvConfig(name="tools", tools=["python", "shell", "files"], sandbox=SandboxConfig(timeout_s=3))

    async def run():
        make, answers = build_env_factory(config), []
        resources = Resources()
        try:
            env = make(**await resources.of_group(Task("t", (Message("user", "u"),))).of_trajectory().open(make.needs))
            for name, arguments in calls:
                step = await env.step(Parsed(Message("assistant", "", (ToolCall(name, arguments, "c"),))))
                answers.append(step.messages[0].content)
        finally:
            await resources.aclose()
        return answers

    answers = asyncio.run(run())
    assert answers[:4] == ["42", "one two\n[exit status 3]", "a.txt has 9 characters now", "one three"]
    assert answers[4].startswith("Error: ") and "ZeroDivisionError" in answers[5] and "its time was over" in answers[6]


@pytest.mark.parametrize("place", ["here-namespaces", "here-landlock"])
def test_a_program_that_lives_on_has_pipes_and_the_one_address_it_was_granted(place):
    text = (
        "import socket, sys\nfor line in sys.stdin:\n  s = socket.create_connection(('127.0.0.1', int(line)), timeout=5)\n"
        "  print(s.recv(9).decode(), flush=True)"
    )

    async def run():
        async def greet(reader, writer):
            writer.write(b"hello")
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with opened(place, loopback=("127.0.0.1", port)) as sandbox:
            program = await sandbox.spawn(["python", "-I", "-S", "-u", "-c", text])
            program.stdin.write(b"%d\n" % port)
            assert await asyncio.wait_for(program.stdout.readline(), 20) == b"hello\n"
            program.stdin.write(b"%d\n" % (port + 1))
            assert (await asyncio.wait_for(program.ended, 20)).status == 1
            assert b"Error" in await program.stderr.read()
            program.stdin.close()
        server.close()

    asyncio.run(run())


async def run_code(request):
    """A server of the protocol, without isolation."""
    import tempfile

    body = await request.json()
    assert body["language"] == "bash"
    with tempfile.TemporaryDirectory() as folder:
        for name, content in body["files"].items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))
        try:
            done = await asyncio.to_thread(
                subprocess.run, ["bash", "-c", body["code"]], cwd=folder, input=body["stdin"].encode(), capture_output=True,
                timeout=body["run_timeout"],
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return web.json_response({"status": "Failed", "message": "", "run_result": {"status": "TimeLimitExceeded"}, "files": {}})
        files = {name: base64.b64encode(Path(folder, name).read_bytes()).decode() for name in body["fetch_files"]}
    result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout.decode(), "stderr": done.stderr.decode()}
    status = "Failed" if done.returncode else "Success"
    return web.json_response({"status": status, "message": "", "compile_result": None, "run_result": result, "files": files})


async def broken(request):
    return web.json_response({"status": "SandboxError", "message": "no room"})


def test_a_server_of_the_protocol_keeps_the_folder_between_calls():
    async def run():
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/run_code", run_code)
        app.router.add_post("/broken/run_code", broken)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        try:
            sandbox = FusionSandbox(SandboxConfig(kind="fusion", at=url))
            await sandbox.write("in/a.txt", b"one")
            done = await sandbox.exec(["sh", "-c", "cat in/a.txt; cat; echo two > b; ln -s /etc/passwd link; exit 4"], b"!")
            assert (done.stdout, done.status) == ("one!", 4)
            assert (await sandbox.exec(["cat", "b"])).stdout == "two\n" and await sandbox.read("b") == b"two\n"
            assert await sandbox.list() == ["b", "in/", "link"] and await sandbox.list("in") == ["a.txt"]
            assert (await sandbox.exec(["sleep", "9"], timeout_s=0.5)).reason == "time"
            for path in ("link", "../x", "missing"):
                with pytest.raises(PathRefused):
                    await sandbox.read(path)
            with pytest.raises(SandboxFailed, match="no room"):
                await FusionSandbox(SandboxConfig(kind="fusion", at=f"{url}/broken")).exec(["true"])
        finally:
            await runner.cleanup()

    asyncio.run(run())


DOCKER = """#!/usr/bin/env python3
import os, sys
with open(os.environ["FAKE_DOCKER_LOG"], "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    print("abc123")
elif sys.argv[1] == "exec":
    command = sys.argv[sys.argv.index("abc123") + 1 :]
    if command != ["sh", "-c", "kill -9 -1"]:
        os.chdir(os.environ["FAKE_DOCKER_FOLDER"])
        os.execvp(command[0], command)
"""


@pytest.mark.long
def test_a_container_has_no_network_no_rights_and_limits_and_each_call_ends_all_that_it_started(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "work").mkdir()
    fake = tmp_path / "bin/docker"
    fake.write_text(DOCKER)
    fake.chmod(0o755)
    for name, value in (("PATH", f"{tmp_path}/bin:{os.environ['PATH']}"), ("FAKE_DOCKER_LOG", f"{tmp_path}/log")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FAKE_DOCKER_FOLDER", f"{tmp_path}/work")

    async def run():
        sandbox = await DockerSandbox.open(SandboxConfig(kind="docker", at="python:3.12-slim"))
        await sandbox.write("a/b", b"one")
        assert await sandbox.read("a/b") == b"one" and await sandbox.list() == ["a/"]
        assert (await sandbox.exec(["sh", "-c", "cat a/b; exit 3"])).status == 3
        assert (await sandbox.exec(["sleep", "9"], timeout_s=0.5)).reason == "time"
        with pytest.raises(PathRefused):
            await sandbox.read("../log")
        await sandbox.close()

    asyncio.run(run())
    log = (tmp_path / "log").read_text()
    for option in ("--network none", "--read-only", "--cap-drop ALL", "no-new-privileges", "--pids-limit 72", "--memory 512m", "size=64m"):
        assert option in log
    assert log.count("kill -9 -1") == 2 and "kill abc123" in log


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"kind": "docker"}, "needs env.sandbox.at, the image"),
        ({"at": "x"}, 'at="x" has no effect'),
        ({"kind": "fusion", "at": "http://h", "unsafe": True}, "unsafe=true has no effect"),
        ({"paths": ["relative"]}, "needs full paths below /"),
    ],
)
def test_settings_that_do_nothing_are_refused(settings, words):
    with pytest.raises(ValueError) as error:
        SandboxConfig(**settings)
    assert words in str(error.value)
