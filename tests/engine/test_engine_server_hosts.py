"""Servers on other machines than this one, which a fake plays: what is looked at before one starts, its address and its key."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.engine.test_engine_sglang import letters
from whet.engine.base import EngineFailed
from whet.engine.servers.hosts import LOOPBACK
from whet.engine.servers.start import ServerAddress, ServerStarter
from whet.engine.sglang.start import Sglang
from whet.engine.vllm.start import Vllm


class Host:
    """A machine whose server ends at once."""

    title, address, node_address = "machine-2 (node ab)", "127.0.0.2", "127.0.0.2"

    def __init__(self, *missing: Path, python: str | None = "/there/python"):
        self.missing, self.python, self.closed, self.looked_at, self.started = missing, python, 0, [], None

    def find(self, program):
        return self.python

    def free_port(self, address):
        assert address == self.address
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
    assert (python, dash, module) == ("/there/python", "-m", "whet_vllm.serve")
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


class Node:
    """One of the machines of a server on several. Its process runs until it is ended; `fails`: it does not start."""

    def __init__(self, name, address, node_address, fails=False):
        self.title, self.address, self.node_address, self.fails = name, address, node_address, fails
        self.closed, self.process, self.ports = 0, None, iter(range(80, 90))

    def find(self, program):
        return "/there/python"

    def free_port(self, address):
        assert address in (self.address, self.node_address)
        return next(self.ports)

    def lacks(self, path):
        return False

    def start(self, name, command, environment):
        if self.fails:
            raise EngineFailed("it cannot be started")
        self.process = Process(command, environment)
        return self.process

    def close(self):
        self.closed += 1


class Process:
    def __init__(self, command, environment):
        self.command, self.environment, self.ended = command, environment, None

    def last_lines(self):
        return ["RuntimeError: no memory is left" if self.ended == "exit code 1" else "it is ended"]

    def kill(self):
        self.ended = self.ended or "killed"


def on_nodes(kind, tmp_path, nodes, given_up, **args):
    left = list(nodes)
    starter = ServerStarter(
        kind, "server 0", "python", tmp_path, "float32", {"nnodes": len(nodes), **args}, letters, None, 20.0,
        lambda name, given_up: left.pop(0), num_nodes=len(nodes),
    )  # fmt: skip
    return starter(given_up)


def started(kind, tmp_path, addresses, **args):
    """Commands and environments of the nodes of a server that is given up before it answers."""
    nodes = [Node(f"machine-{i}", *pair) for i, pair in enumerate(addresses)]
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(EngineFailed, match="closed"):
        on_nodes(kind, tmp_path, nodes, given_up, **args)
    assert all(node.process.ended == "killed" for node in nodes), "no node outlives the start"
    return [(" ".join(node.process.command), node.process.environment) for node in nodes]


def test_the_processes_of_vllm_on_two_nodes_meet_at_the_first_and_draw_the_same_noise(tmp_path):
    (head, environment), (other, of_other) = started(
        Vllm(), tmp_path, [(LOOPBACK, "10.0.0.1"), ("10.0.0.2", "10.0.0.2")], tensor_parallel_size=2
    )
    assert head.startswith(f"/there/python -m whet_vllm.serve {tmp_path} --host 127.0.0.1 --port 80 ")
    assert other.startswith(f"/there/python -m whet_vllm.serve {tmp_path} --headless ") and "--port" not in other
    for rank, words in enumerate((head, other)):
        assert f"--node-rank {rank} --master-addr 10.0.0.1 --master-port 81" in words and "--nnodes 2" in words
    assert head.partition("--seed ")[2].split()[0] == other.partition("--seed ")[2].split()[0]
    assert environment["VLLM_HOST_IP"] == "10.0.0.1" and of_other["VLLM_HOST_IP"] == "10.0.0.2"


def test_the_processes_of_sglang_on_two_nodes_have_one_key_and_their_own_addresses(tmp_path):
    (head, environment), (other, of_other) = started(Sglang(), tmp_path, [("fd00::1", "fd00::1"), ("fd00::2", "fd00::2")], tp_size=2)
    for rank, words in enumerate((head, other)):
        assert f"--host fd00::{rank + 1} --port 80 " in words
        assert f"--node-rank {rank} --dist-init-addr [fd00::1]:81" in words and "--nnodes 2" in words
    key = head.partition("--api-key ")[2].split()[0]
    assert len(key) > 20 and f"--api-key {key} --admin-api-key {key}" in other
    assert environment["SGLANG_HOST_IP"] == "fd00::1" and of_other["SGLANG_HOST_IP"] == "fd00::2"


def test_a_node_that_cannot_be_started_ends_and_frees_all(tmp_path):
    nodes = [Node("machine-0", LOOPBACK, "10.0.0.1"), Node("machine-1", "10.0.0.2", "10.0.0.2", fails=True)]
    with pytest.raises(EngineFailed, match="it cannot be started"):
        on_nodes(Vllm(), tmp_path, nodes, threading.Event())
    assert nodes[0].process.ended == "killed" and [node.closed for node in nodes] == [1, 1]


def test_a_node_whose_process_ends_ends_all_and_its_reason_is_told(tmp_path):
    nodes = [Node(f"machine-{i}", LOOPBACK, LOOPBACK) for i in range(3)]

    start = nodes[2].start

    def start_and_end(name, command, environment):
        process = start(name, command, environment)
        threading.Timer(0.5, lambda: setattr(process, "ended", "exit code 1")).start()
        return process

    nodes[2].start = start_and_end
    with pytest.raises(EngineFailed, match=r"server 0 did not start \(exit code 1\): RuntimeError: no memory is left"):
        on_nodes(Vllm(), tmp_path, nodes, threading.Event())
    assert [node.process.ended for node in nodes] == ["killed", "killed", "exit code 1"]
