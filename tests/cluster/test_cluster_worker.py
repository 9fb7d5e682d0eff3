"""A worker on a cluster as the engine watches it, with an actor that is played."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from whet.cluster.agent import ActorPlace
from whet.cluster.config import ClusterConfig
from whet.cluster.process import Command, OutputEnd, OutputLine, ProcessExit
from whet.cluster.ray_engine import RayWorker
from whet.cluster.ray_servers import RayHost
from whet.engine.base import EngineFailed
from whet.engine.servers.hosts import LOOPBACK
from whet.engine.workers.launch import HERE, LOOK_S, last_words

COMMAND = Command(("-m", "nothing"), "{}")


class Lost(Exception):
    pass


class Agent:
    """Its process ends at once; its output comes afterwards."""

    def __init__(self, node="n1"):
        self.killed = threading.Event()
        self.told = iter([[ProcessExit(1, "ended with exit status 1")], [OutputLine("no such device", True)], [OutputEnd()]])
        self._node = node

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(type(self), f"_{name}_").__get__(self))

    def _place_(self):
        return ActorPlace("machine", self._node, "10.0.0.7")

    def _start_(self, command):
        return "process 7 on machine"

    def _next_(self):
        if self.killed.wait(0.1):
            raise Lost
        return next(self.told)


def ray_with(wait):
    return SimpleNamespace(
        wait=wait,
        get=lambda found, timeout=None: found,
        kill=lambda agent: agent.killed.set(),
        exceptions=SimpleNamespace(RayError=Lost),
    )


RAY = ray_with(lambda refs, timeout: (refs, []))


def worker_of(agent, name="w", ray=RAY, given_up=None):
    return RayWorker(ray, agent, name, COMMAND, "n1", 60.0, given_up or threading.Event())


def test_the_last_words_of_a_worker_that_does_not_start_are_heard_before_its_actor_ends():
    agent = Agent()
    worker = worker_of(agent, "engine copy 0")
    assert worker.ended(20.0).code == 1
    assert last_words(worker).endswith("no such device")
    assert agent.killed.wait(20.0), "then its bundle is free"


def test_a_worker_is_on_this_machine_if_it_is_on_the_controllers_node():
    for node, host in (("n1", HERE), ("n2", "machine (node n2)")):
        agent = Agent(node)
        assert worker_of(agent).host == host
        assert agent.killed.wait(20.0), "else its last words would come in the midst of another test"


def test_a_worker_that_is_given_up_while_its_actor_is_waited_for_is_not_started():
    agent, given_up, looks = Agent(), threading.Event(), []

    def nobody_comes(refs, timeout):
        looks.append(timeout)
        if len(looks) == 3:
            given_up.set()
        return [], refs

    with pytest.raises(EngineFailed, match="engine copy 0: it was given up before its actor was there"):
        worker_of(agent, "engine copy 0", ray_with(nobody_comes), given_up)
    assert looks == [LOOK_S] * 3, "it is looked at while the actor is waited for"
    assert agent.killed.is_set(), "and nothing is left of it"


class Node(Agent):
    """An actor on the node `n2`, and what it answers about it."""

    def __init__(self):
        super().__init__("n2")
        self.signals = []

    def _find_(self, program):
        return f"/there/{program}"

    def _free_port_(self, address):
        return {"10.0.0.7": 4000}[address]

    def _exists_(self, path):
        return path == "/shared"

    def _signal_(self, number):
        self.signals.append(number)

    def _start_(self, command):
        self.command = command
        return super()._start_(command)


def host_on(node, here="n1", devices=(), **cluster):
    room = SimpleNamespace(devices=devices)
    bundles = SimpleNamespace(ray=RAY, here=here, room=room, agent=lambda name: node, place=lambda name: 0)
    config = ClusterConfig.model_validate({"backend": "ray", "layout": "disaggregate", **cluster})
    return RayHost(bundles, "vllm 0", config, threading.Event())


def test_a_server_on_another_node_needs_a_private_network():
    node = Node()
    words = r"vllm 0 was placed on machine \(node n2\), another .* address 10.0.0.7, .*: set cluster.private_network=true if"
    with pytest.raises(EngineFailed, match=words):
        host_on(node)
    assert node.killed.is_set(), "its bundle is free"
    assert host_on(Node(), private_network=True).address == "10.0.0.7"
    assert host_on(Node(), here="n2").address == LOOPBACK


def test_a_server_on_another_node_is_started_under_its_guard():
    node = Node()
    host = host_on(node, private_network=True, devices=("4,5",))
    assert (host.find("python"), host.free_port(host.address)) == ("/there/python", 4000)
    assert (host.lacks(Path("/shared")), host.lacks(Path("/here"))) == (False, True)
    process = host.start("vllm 0", ["/there/python", "-m", "vllm", "--port", "4000"], {"VLLM_API_KEY": "secret"})
    assert node.command.arguments == ("-m", "whet.engine.servers.guard", "/there/python", "-m", "vllm", "--port", "4000")
    assert node.command.environment.items() >= {"VLLM_API_KEY": "secret", "CUDA_VISIBLE_DEVICES": "4,5"}.items()
    assert not node.command.is_trainer, "it gets no token of the trainer's"
    assert node.killed.wait(20.0) and process.ended == "exit status 1" and process.last_lines() == ["no such device"]


def test_a_server_that_runs_is_asked_to_end_before_it_is_killed():
    node = Node()
    node.told = iter(lambda: [], None)
    process = host_on(node, private_network=True).start("vllm 0", ["python"], {})
    threading.Timer(0.3, lambda: setattr(node, "told", iter([[ProcessExit(143, "ended")], [OutputEnd()]]))).start()
    assert process.ended is None
    process.stop()
    assert node.signals == [signal.SIGTERM] and process.ended == "exit status 143" and node.killed.is_set()
