"""The engine's processes as Ray places them, started by the controller of a job; and started again there where one dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from whet.cluster.agent import POLL_S
from whet.cluster.config import ClusterConfig
from whet.cluster.connection import connected
from whet.cluster.engine_worker import line_of
from whet.cluster.process import LAST_OUTPUT_S, Command, OutputLine, ProcessEvent, ProcessExit
from whet.cluster.ray_job import PASSED_ON, RayProcess, agent_in
from whet.cluster.room import ROOM, EngineRoom
from whet.engine.base import EngineFailed
from whet.engine.workers import dialing, launch
from whet.runfolder.stacks import SAY_HELD_STACKS, SAY_STACKS

WORKER = ("-m", "whet.cluster.engine_worker")
"""Arguments of the interpreter on the node."""


@contextmanager
def engine_launcher(config: ClusterConfig) -> Iterator[launch.Launcher | None]:
    """Launcher of the engine's processes; None: they are this process's children. It works until the
    block ends.

    Raises:
        ValueError: if the cluster cannot be reached from here, or nothing was set apart there for the engine.
    """
    if config.backend != "ray":
        yield None
        return
    if ROOM not in os.environ:
        raise ValueError("cluster.backend=ray: the engine's processes have their places from `whet train`, which did not start this one")
    room = EngineRoom.of(os.environ[ROOM])
    with connected(config.model_copy(update={"address": room.address}), 0, namespace=room.namespace) as there:
        ray = there.ray
        starter = _Starter(ray, room, config.start_timeout_s)
        yield dialing.DialingLauncher(starter.begin, ray.util.get_node_ip_address(), config.start_timeout_s)


class _Starter:
    """Starts each process of the engine in its bundle."""

    def __init__(self, ray: Any, room: EngineRoom, timeout_s: float) -> None:
        self._ray, self._room, self._timeout_s = ray, room, timeout_s
        self._group = ray.util.get_placement_group(room.group)
        self._lock = threading.Lock()
        self._bundles: dict[str, int] = {}
        """Bundles by the names of the engine's processes: a restarted one keeps its bundle."""

    def begin(self, name: str, invitation: dialing.Invitation, given_up: threading.Event) -> launch.WorkerProcess:
        engines = self._room.engines
        with self._lock:  # several are started at once
            place = self._bundles.setdefault(name, len(self._bundles))
        if place >= len(engines):
            raise EngineFailed(f"{name}: the run has room on the cluster for {len(engines)} processes of the engine")
        agent = agent_in(self._ray, self._group, engines[place], self._room.engine)
        environment = {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}
        command = Command(WORKER, line_of(invitation), environment, os.getcwd(), is_trainer=False)
        return RayWorker(self._ray, agent, name, command, self._room.controller, self._timeout_s, given_up)


@dataclass(frozen=True, slots=True)
class Lost(launch.ExitStatus):
    """A process that ended with its actor: how, only Ray can tell."""

    how: str

    @property
    def words(self) -> str:
        return self.how


class RayWorker:
    """A worker's process on a cluster, as the engine watches it (`launch.WorkerProcess`). Its output goes to standard error
    after its name.

    Args:
        ray: the package, connected.
        agent: the actor that starts it; it ends with it.
        name: name of the worker.
        command: the process to start.
        here: the node that this process is on.
        timeout_s: for the actor to be there.
        given_up: set when nobody waits for it any more.

    Raises:
        EngineFailed: if the actor does not come, or was given up before it did.
    """

    def __init__(
        self, ray: Any, agent: Any, name: str, command: Command, here: str, timeout_s: float, given_up: threading.Event
    ) -> None:
        self._ray, self._agent, self._words = ray, agent, launch.Words(name)
        self._over, self._heard = threading.Event(), threading.Event()
        self._end: launch.ExitStatus | None = None
        try:
            asked = agent.place.remote()
            deadline = time.monotonic() + timeout_s
            while not ray.wait([asked], timeout=launch.LOOK_S)[0] and time.monotonic() < deadline:
                if given_up.is_set():
                    ray.kill(agent)
                    raise EngineFailed(f"{name}: it was given up before its actor was there")
            place = ray.get(asked, timeout=0.0)
            self.host = launch.HERE if place.node == here else f"{place.host} (node {place.node[:8]})"
            self._process = RayProcess(ray, agent, command, self._hear, timeout_s)
        except ray.exceptions.RayError as error:
            ray.kill(agent)
            raise EngineFailed(f"{name} cannot be started on the cluster: {error}") from error

    def ended(self, timeout_s: float) -> launch.ExitStatus | None:
        self._over.wait(timeout_s)
        return self._end

    def kill(self) -> None:
        """End the process and its actor, whose bundle is then free for another."""
        if self._end is None:
            self._process.kill()
            self._over.wait(dialing.HANDSHAKE_TIMEOUT_S)
        self._ray.kill(self._agent)

    def stacks(self, *, lost: bool) -> str:
        if self._end is not None:
            return ""
        printed = self._words.stacks(lambda: self._process.signal(SAY_STACKS))
        return printed or (self._words.held_stacks(lambda: self._process.signal(SAY_HELD_STACKS)) if lost else "")

    def last_lines(self) -> list[str]:
        if self._end is not None:
            self._heard.wait(LAST_OUTPUT_S + POLL_S)
        return self._words.last

    def _hear(self, event: ProcessEvent) -> None:
        if isinstance(event, OutputLine):
            self._words.hear(event.text)
        elif isinstance(event, ProcessExit):
            self._end = Lost(-signal.SIGKILL, event.how) if event.code is None else launch.ExitStatus(event.code)
            self._over.set()
        else:  # its last output was read
            self._heard.set()
            if self._end is not None:
                self._ray.kill(self._agent)
