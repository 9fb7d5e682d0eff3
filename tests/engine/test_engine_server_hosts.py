"""Servers on other machines than this one, which a fake plays: what is looked at before one starts, its address and its key."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.engine.test_engine_sglang import letters
from whet.engine.base import EngineFailed
from whet.engine.servers.start import ServerAddress, ServerStarter
from whet.engine.sglang.start import Sglang
from whet.engine.vllm.start import Vllm


class Host:
    """A machine whose server ends at once."""

    title, address = "machine-2 (node ab)", "127.0.0.2"

    def __init__(self, *missing: Path, python: str | None = "/there/python"):
        self.missing, self.python, self.closed, self.looked_at, self.started = missing, python, 0, [], None

    def find(self, program):
        return self.python

    def free_port(self):
        return 80

    def lacks(self, path):
        assert path.exists()
        self.looked_at.append(path)
        return any(path == each or path.parent == each for each in self.missing)

    def start(self, name, command, environment):
        self.started = command, environment
        raise EngineFailed("it ended")

    def close(self):
        self.closed += 1


def start(host: Host, folder: Path, kind=None, versions: Path | None = None):
    model = folder / "model"
    model.mkdir()
    starter = ServerStarter(
        kind or Sglang(), "sglang 0", "python", model, "float32", {}, letters, None, 20.0, lambda name, given_up: host, versions
    )
    with pytest.raises(EngineFailed) as raised:
        starter(threading.Event())
    assert host.closed == 1, "its bundle is free again"
    return str(raised.value)


def test_a_machine_without_the_models_folder_is_named(tmp_path):
    words = start(Host(tmp_path / "model"), tmp_path)
    assert words.startswith(f"sglang 0: machine-2 (node ab) has no {tmp_path}/model, the model's folder here: keep it on a file system")


def test_a_machine_that_does_not_see_new_weights_is_named(tmp_path):
    """A folder of the same name there does not count: it lacks the file that was written here."""
    versions = tmp_path / "run/sync"
    host = Host(versions)
    words = start(host, tmp_path, versions=versions)
    assert f"machine-2 (node ab) does not see what is written to {versions}" in words and "sync.transport=broadcast" in words
    assert len(host.looked_at) == 2 and list(versions.iterdir()) == []


def test_a_machine_without_the_servers_python_is_named(tmp_path):
    assert start(Host(python=None), tmp_path).startswith("engine.python: there is no python on machine-2 (node ab); name the Python of")


def test_a_server_on_another_machine_listens_there_and_has_a_key_of_its_own(tmp_path):
    host = Host()
    start(host, tmp_path, Vllm(), tmp_path)
    (python, dash, module, *words), environment = host.started
    assert (python, dash, module) == ("/there/python", "-m", "vllm.entrypoints.openai.api_server")
    assert words[words.index("--host") + 1] == "127.0.0.2" and words[words.index("--port") + 1] == "80"
    key = environment["VLLM_API_KEY"]
    assert len(key) > 20 and key not in words, "other users read command lines"
    other = Host()
    (tmp_path / "other").mkdir()
    start(other, tmp_path / "other", Vllm())
    assert other.started[1]["VLLM_API_KEY"] != key


def test_keys_reach_servers_in_their_own_ways(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "somebody's")
    monkeypatch.setenv("VLLM_PORT", "9")
    here, there = ServerAddress(80), ServerAddress(80, "fd00::2", "secret")
    assert (here.url, there.url) == ("http://127.0.0.1:80", "http://[fd00::2]:80") and "secret" not in repr(there)
    assert "VLLM_API_KEY" not in Vllm().environment(here) and Vllm().environment(there)["VLLM_API_KEY"] == "secret"
    assert Vllm().environment(here)["VLLM_PORT"] == "9"
    assert " ".join(Sglang().command(tmp_path, there, "float32", {})).endswith("--api-key secret --admin-api-key secret")
    assert "--api-key" not in Sglang().command(tmp_path, here, "float32", {})
