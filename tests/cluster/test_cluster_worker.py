"""A worker on a cluster as the engine watches it, with an actor that is played."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from whet.cluster.agent import ActorPlace
from whet.cluster.process import Command, OutputEnd, OutputLine, ProcessExit
from whet.cluster.ray_engine import RayWorker
from whet.engine.base import EngineFailed
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
