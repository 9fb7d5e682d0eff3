"""`whet record`: a file of calls for each session."""

from __future__ import annotations

import asyncio
import json
import stat
import subprocess
import sys

import pytest
from openai import APIStatusError, AsyncOpenAI

from tests.rollout.scripted import run
from tests.serve.serve_setup import scripted
from whet.record.app import RecorderApp
from whet.record.folder import SessionFolder, claim_sessions
from whet.runfolder.lock import FolderInUse, owner_of
from whet.runs.commands import record
from whet.serve.access import Keys
from whet.serve.server import address_of, bind, run_server
from whet.serve.settings import ServeConfig

KEY = "a-key-of-the-server"


def recorded(service, folder, keys, play):
    """Play against a recording server, and return the lines of its sessions."""

    async def main():
        claimed = claim_sessions(folder)
        sessions = SessionFolder(service, claimed)
        up = asyncio.get_running_loop().create_future()
        bound = bind(service.config.host, service.config.port, keys)
        app = RecorderApp(sessions.find, by_header=keys.api is None)
        serving = asyncio.create_task(run_server(sessions.service, bound, keys, up.set_result, app))
        closing = await up
        try:
            await play(address_of(bound))
        finally:
            closing.ask()
            await serving
            await sessions.close()
            claimed.release()

    run(main())
    return {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in folder.glob("*.jsonl")}


async def says(url, key, messages, **options):
    client = AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
    answer = await client.chat.completions.create(model="gpt", messages=messages, max_tokens=30, **options)
    return answer.choices[0].message.content


def test_sessions_are_named_by_path_or_key_and_have_every_call_token_by_token(models, tmp_path):
    async def play(address):
        messages = [{"role": "user", "content": "a"}]
        reply = await says(f"{address}/s/one/v1", "unused", messages, temperature=0.5)
        more = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": "b"}]
        await says(f"{address}/s/one/v1", "unused", more)
        await says(f"{address}/v1", "two", messages)

    with scripted(models[0], "sure") as service:
        lines = recorded(service, tmp_path / "out", Keys(), play)
        expected = (*service.renderer.encode("sure"), service.renderer.stop_token_ids[0])
    assert {name: len(found) for name, found in lines.items()} == {"one": 2, "two": 1}
    first, second = lines["one"]
    assert (first["rule"], second["rule"], second["parent"], second["continues"]) == ("first", "extends", 0, True)
    assert tuple(first["tokens"]) == expected and len(first["logprobs"]) == len(expected) and first["temperature"] == 0.5
    assert second["prompt"][: len(first["prompt"]) + len(expected)] == [*first["prompt"], *expected]
    assert first["message"]["content"] == "sure" and first["versions"] == [[3, len(expected)]] and first["model"] == "gpt"
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (tmp_path / "out").glob("*.jsonl"))


def test_with_a_key_of_the_server_the_path_alone_names_a_session_and_no_key_is_written(models, tmp_path):
    async def play(address):
        messages = [{"role": "user", "content": "a"}]
        await says(f"{address}/v1", KEY, messages)
        for url, key in ((f"{address}/s/one/v1", "wrong-key-wrong-key"), (f"{address}/s/..%2Fetc/v1", KEY), (f"{address}/s/a b/v1", KEY)):
            with pytest.raises(APIStatusError) as error:
                await says(url, key, messages)
            assert error.value.status_code == 401

    with scripted(models[0], "sure") as service:
        lines = recorded(service, tmp_path / "out", Keys(api=KEY), play)
    assert set(lines) == {"default"}
    assert all(KEY not in path.name and KEY not in path.read_text() for path in (tmp_path / "out").iterdir())


def test_a_folder_with_sessions_is_left_alone(tmp_path):
    (tmp_path / "one.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match="recorded sessions already"):
        claim_sessions(tmp_path)
    assert owner_of(tmp_path) is None


HOLDS = """
import sys, time
from pathlib import Path
from whet.record.folder import claim_sessions
claimed = claim_sessions(Path(sys.argv[1]))
print("has it", flush=True)
time.sleep(600)
"""


def test_two_processes_never_record_into_one_folder(tmp_path):
    folder, nothing = tmp_path / "out", tmp_path / "model"
    nothing.mkdir()
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "has it\n"
        config = ServeConfig.model_validate({"model": {"path": str(nothing)}})
        words = rf"in use by process {other.pid} .*whet record --out {folder}.*; wait until it has ended, stop it, or choose another folder"
        with pytest.raises(FolderInUse, match=words):
            record(config, folder)  # before it looks for the model
    finally:
        other.kill()
        other.communicate()
    with claim_sessions(folder), pytest.raises(FolderInUse):
        claim_sessions(folder)
    claim_sessions(folder).release()
