"""A worker on a cluster as the engine watches it, with an actor that is played."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from whet.cluster.process import Command, Ended, Said, Silent
from whet.cluster.ray_engine import RayWorker
from whet.engine.embedded.launch import HERE, said

COMMAND = Command(("-m", "nothing"), "{}")


class Lost(Exception):
    pass


class Agent:
    """Its process ends at once; what it said comes afterwards."""

    def __init__(self, node="n1"):
        self.killed = threading.Event()
        self.told = iter([[Ended(1, "ended with exit status 1")], [Said("no such device", True)], [Silent()]])
        self._node = node

    def __getattr__(self, name):
        return SimpleNamespace(remote=getattr(type(self), f"_{name}_").__get__(self))

    def _host_(self):
        return "machine"

    def _node_(self):
        return self._node

    def _start_(self, command):
        return 7

    def _next_(self):
        if self.killed.wait(0.1):
            raise Lost
        return next(self.told)


RAY = SimpleNamespace(
    get=lambda found, timeout=None: found, kill=lambda agent: agent.killed.set(), exceptions=SimpleNamespace(RayError=Lost)
)


def test_the_last_words_of_a_worker_that_does_not_start_are_heard_before_its_actor_ends():
    agent = Agent()
    worker = RayWorker(RAY, agent, "engine copy 0", COMMAND, "n1", 5.0)
    assert worker.ended(20.0).code == 1
    assert said(worker).endswith("no such device")
    assert agent.killed.wait(20.0), "then its bundle is free"


def test_a_worker_is_on_this_machine_if_it_is_on_the_leaders_node():
    assert RayWorker(RAY, Agent(), "w", COMMAND, "n1", 5.0).host == HERE
    assert RayWorker(RAY, Agent("n2"), "w", COMMAND, "n1", 5.0).host == "machine (node n2)"
