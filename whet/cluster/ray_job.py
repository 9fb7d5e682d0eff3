"""The processes of a job as Ray places them: an actor for each, which starts it on its node and hears it."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from whet.cluster.agent import Agent, Place
from whet.cluster.config import ClusterConfig
from whet.cluster.connection import Bundle, connected, room
from whet.cluster.local import on_one_machine, place_of
from whet.cluster.process import Command, Ended, Process, Silent, Tell
from whet.cluster.supervise import LOG, Job

PASSED_ON = ("GLOO_", "HF_HUB_OFFLINE", "NCCL_", "OMP_", "TORCH_", "WHET_TRACEBACK")
"""How the variables begin that a process on another node gets from this one's environment."""
THREADS = 4
"""Calls that an agent answers at a time: one waits for what happens, a signal or an end must not wait with it."""
MEET = timedelta(minutes=10)
"""How long a process waits for the others to come."""


def trainer_bundle(config: ClusterConfig, gpus_there: float) -> dict[str, float]:
    """What a process of the trainer has, by Ray's names."""
    gpus = config.trainer_gpus if config.trainer_gpus is not None else float(gpus_there > 0)
    return {"CPU": config.trainer_cpus, **({"GPU": gpus} if gpus else {})}


def run_on_ray(config: ClusterConfig, num_ranks: int, arguments: Sequence[str], line: str, run_dir: Path) -> int:
    """Run a job of processes that Ray places. Arguments, result and errors as for `run_local`; further:

    Raises:
        ValueError: if there is no cluster, or no room in it.
    """
    with connected(config, num_ranks * config.trainer_cpus) as ray:
        bundle = trainer_bundle(config, ray.cluster_resources().get("GPU", 0))
        with room(ray, [bundle] * num_ranks, config, f"whet-{uuid.uuid4().hex[:8]}") as group:
            agents = [agent_in(ray, group, i, bundle) for i in range(num_ranks)]
            places: list[Place] = ray.get([agent.place.remote() for agent in agents], timeout=config.start_timeout_s)
            host = ray.util.get_node_ip_address()
            store = dist.TCPStore(host, 0, num_ranks, is_master=True, timeout=MEET, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
            shared = {
                **{key: value for key, value in os.environ.items() if key.startswith(PASSED_ON)},
                **(on_one_machine(num_ranks) if len({place.host for place in places}) == 1 else {}),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",  # the first rank joins the store as the others do
            }

            def start(rank: int, tell: Tell) -> Process:
                environment = {**shared, **place_of(rank, 0, num_ranks)}  # a process sees its own GPU alone
                command = Command(tuple(arguments), line, environment, os.getcwd())
                return RayProcess(ray, agents[rank], places[rank], command, tell)

            return Job(num_ranks, run_dir / LOG).run(start)


def agent_in(ray: Any, group: Any, bundle_index: int, resources: Bundle) -> Any:
    """An agent in a bundle of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return (
        ray.remote(Agent)
        .options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_concurrency=THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle_index),
        )
        .remote()
    )


class RayProcess:
    """A `Process` that an agent starts.

    Args:
        ray: the package, connected.
        agent: the actor.
        place: where it is.
        command: what to start.
        tell: is told what it says and how it ends.
    """

    def __init__(self, ray: Any, agent: Any, place: Place, command: Command, tell: Tell) -> None:
        self._ray, self._agent, self._place, self._tell = ray, agent, place, tell
        self.pid: int = ray.get(agent.start.remote(command))
        threading.Thread(target=self._listen, name=f"process {self.pid} on {place.host}", daemon=True).start()

    def signal(self, number: int) -> None:
        self._agent.signal.remote(number)

    def kill(self) -> None:
        self._agent.kill.remote()

    def _listen(self) -> None:
        ended = False
        try:
            while True:
                for event in self._ray.get(self._agent.next.remote()):
                    if isinstance(event, Ended):
                        ended = True
                        event = Ended(event.code, f"(process {self.pid} on {self._place.host}) {event.how}")
                    self._tell(event)
                    if isinstance(event, Silent):
                        return
        except self._ray.exceptions.RayError as error:  # with its actor or node the process ends, too
            if not ended:
                why = str(error).strip().split("\n")[0]
                self._tell(Ended(None, f"(process {self.pid} on {self._place.host}) was lost with its actor: {why}"))
            self._tell(Silent())
