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

from whet.cluster.agent import POLL_S, ActorPlace
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
    with engine_bundles(config) as bundles:

        def begin(name: str, invitation: dialing.Invitation, given_up: threading.Event) -> launch.WorkerProcess:
            agent = bundles.agent(name)
            command = Command(WORKER, line_of(invitation), passed_on(), os.getcwd(), is_trainer=False)
            return RayWorker(bundles.ray, agent, name, command, bundles.here, config.start_timeout_s, given_up)

        yield dialing.DialingLauncher(begin, bundles.address, config.start_timeout_s)


def passed_on() -> dict[str, str]:
    """Environment variables that a process of the engine on another node gets from this one."""
    return {key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)}


@contextmanager
def engine_bundles(config: ClusterConfig) -> Iterator[EngineBundles]:
    """The bundles that `whet train` reserved for the engine, until the block ends.

    Raises:
        ValueError: if the cluster cannot be reached from here, or nothing was reserved.
    """
    if ROOM not in os.environ:
        raise ValueError("cluster.backend=ray: the engine's processes have their places from `whet train`, which did not start this one")
    room = EngineRoom.of(os.environ[ROOM])
    with connected(config.model_copy(update={"address": room.address}), 0, namespace=room.namespace) as there:
        yield EngineBundles(there.ray, room)


class EngineBundles:
    """The bundles of the engine's processes.

    Args:
        ray: the package, connected.
        room: the bundles.
    """

    def __init__(self, ray: Any, room: EngineRoom) -> None:
        self.ray, self.here, self.room = ray, room.controller, room
        self.address: str = ray.util.get_node_ip_address()
        """This machine's, as the cluster knows it."""
        self._group = ray.util.get_placement_group(room.group)
        self._lock = threading.Lock()
        self._places: dict[str, int] = {}
        """Numbers of the engine's processes by their names: a restarted one keeps its bundle."""

    def place(self, name: str) -> int:
        """Number of a process among those of the engine; the same each time.

        Raises:
            EngineFailed: if there are more processes than bundles.
        """
        with self._lock:  # several are started at once
            place = self._places.setdefault(name, len(self._places))
        if place >= len(self.room.engines):
            raise EngineFailed(f"{name}: the run has room on the cluster for {len(self.room.engines)} processes of the engine")
        return place

    def agent(self, name: str) -> Any:
        """An actor for a process, in its bundle. Raises EngineFailed as `place`."""
        return agent_in(self.ray, self._group, self.room.engines[self.place(name)], self.room.engine)


def place_of_agent(ray: Any, agent: Any, name: str, timeout_s: float, given_up: threading.Event) -> ActorPlace:
    """Wait for an actor, and ask it for its place. One that does not come is ended.

    Args:
        ray: the package, connected.
        agent: the actor.
        name: name of its process.
        timeout_s: for the actor to be there.
        given_up: set when nobody waits for it any more.

    Raises:
        EngineFailed: if it does not come, or was given up before it did.
    """
    try:
        asked = agent.place.remote()
        deadline = time.monotonic() + timeout_s
        while not ray.wait([asked], timeout=launch.LOOK_S)[0] and time.monotonic() < deadline:
            if given_up.is_set():
                ray.kill(agent)
                raise EngineFailed(f"{name}: it was given up before its actor was there")
        return ray.get(asked, timeout=0.0)
    except ray.exceptions.RayError as error:
        ray.kill(agent)
        raise EngineFailed(f"{name} cannot be started on the cluster: {error}") from error


def title_of(place: ActorPlace) -> str:
    """A node's name in messages."""
    return f"{place.host} (node {place.node[:8]})"


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
        place = place_of_agent(ray, agent, name, timeout_s, given_up)
        self.host = launch.HERE if place.node == here else title_of(place)
        try:
            self._process = RayProcess(ray, agent, command, self._hear, timeout_s)
        except ray.exceptions.RayError as error:
            ray.kill(agent)
            raise EngineFailed(f"{name} cannot be started on the cluster: {error}") from error

    def ended(self, timeout_s: float) -> launch.ExitStatus | None:
        self._over.wait(timeout_s)
        return self._end

    def end(self, timeout_s: float) -> None:
        """Ask the process to end by SIGTERM, and `kill` it if it has not ended in time."""
        if self._end is None:
            self._process.signal(signal.SIGTERM)
            self._over.wait(timeout_s)
        self.kill()

    def mute(self) -> None:
        """Print nothing of it any more."""
        self._words.muted = True

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
