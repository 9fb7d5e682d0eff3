"""Servers as Ray places them: each in its bundle on some node, started by an actor there, and reached over HTTP."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from whet.cluster.config import ClusterConfig
from whet.cluster.process import Command
from whet.cluster.ray_engine import EngineBundles, RayWorker, engine_bundles, passed_on, place_of_agent, title_of
from whet.engine.base import EngineFailed
from whet.engine.servers.devices import VISIBLE
from whet.engine.servers.hosts import END_S, LOOPBACK, StartedProcess
from whet.engine.servers.pool import ServerSites

T = TypeVar("T")

GUARD = ("-m", "whet.engine.servers.guard")
"""Arguments of the interpreter on the node, before the server's command."""
ANSWER_S = 30.0
"""For an actor that is there to answer a question about its node."""


@contextmanager
def ray_sites(config: ClusterConfig) -> Iterator[ServerSites]:
    """The nodes that Ray places servers on, until the block ends.

    Raises:
        ValueError: if the cluster cannot be reached from here, or nothing was reserved there for servers.
    """
    with engine_bundles(config) as bundles:
        share_gpus = not config.engine_apart and bool(bundles.room.devices or bundles.room.engine.get("GPU", 0))
        yield ServerSites(lambda name, given_up: RayHost(bundles, name, config, given_up), bundles.address, share_gpus)


class RayHost:
    """A `ServerHost` in a bundle of a cluster.

    Args:
        bundles: the bundles of the run's servers.
        name: name of the server.
        config: deadline of the start; tells if the network is private.
        given_up: set when nobody waits for the server any more.

    Raises:
        EngineFailed: if the actor does not come, or is on a node on which the server would be open to a network that is not private.
    """

    def __init__(self, bundles: EngineBundles, name: str, config: ClusterConfig, given_up: threading.Event) -> None:
        self._ray, self._here, self._name, self._config, self._given_up = bundles.ray, bundles.here, name, config, given_up
        self._agent = bundles.agent(name)
        devices = bundles.room.devices
        self._devices = {VISIBLE: devices[bundles.place(name)]} if devices else {}
        place = place_of_agent(self._ray, self._agent, name, config.start_timeout_s, given_up)
        self.title = title_of(place)
        self.node_address = place.address
        self.address = LOOPBACK if place.node == bundles.here else place.address
        if self.address != LOOPBACK and not config.private_network:
            self.close()
            raise EngineFailed(
                f"{name} was placed on {self.title}, another node than the controller's, where it has to listen on the address "
                f"{self.address}, and whoever reaches that may change its weights: set cluster.private_network=true if trusted machines "
                "alone reach it, or give the controller's node room for all servers"
            )

    def find(self, program: str) -> str | None:
        return self._asked(lambda: self._agent.find.remote(program))

    def free_port(self, address: str) -> int:
        return self._asked(lambda: self._agent.free_port.remote(address))

    def lacks(self, path: Path) -> bool:
        return not self._asked(lambda: self._agent.exists.remote(str(path)))

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> StartedProcess:
        """As `ServerHost.start`. The process sees the GPUs that Ray gave to its actor, or to the ranks in its bundle."""
        given = {**passed_on(), **environment, **self._devices}
        guarded = Command((*GUARD, *command), "", given, os.getcwd(), is_trainer=False)
        return RayServer(
            RayWorker(self._ray, self._agent, name, guarded, self._here, self._config.start_timeout_s, self._given_up)
        )

    def close(self) -> None:
        self._ray.kill(self._agent)

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return self._ray.get(ask(), timeout=ANSWER_S)
        except (self._ray.exceptions.RayError, OSError) as error:
            raise EngineFailed(f"{self._name}: {self.title} does not answer as a node of the cluster: {error}") from error


class RayServer:
    """A server's process on a cluster (`StartedProcess`)."""

    def __init__(self, worker: RayWorker) -> None:
        self._worker = worker

    @property
    def ended(self) -> str | None:
        status = self._worker.ended(0)
        return None if status is None else status.words

    def last_lines(self) -> list[str]:
        return self._worker.last_lines()

    def stacks(self) -> str:
        """Nothing: a server is no program of whet's that could be asked, and it may be on another machine."""
        return ""

    def kill(self) -> None:
        """End it, and its engine. Any thread."""
        self._worker.end(END_S)

    def stop(self) -> None:
        self._worker.mute()  # its last words are of its own threads
        self.kill()
