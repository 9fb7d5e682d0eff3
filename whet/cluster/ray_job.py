"""The processes of a job as Ray places them: an actor for each, which starts it on its node and reads its output."""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from whet.cluster.agent import ActorPlace, Agent
from whet.cluster.config import ClusterConfig
from whet.cluster.connection import Connected, connected, room
from whet.cluster.local import on_one_machine, place_of, rendezvous_file
from whet.cluster.process import Command, OnEvent, OutputEnd, Process, ProcessExit
from whet.cluster.room import ROOM, Bundle, EngineRoom, plan_room, shared_devices
from whet.cluster.supervise import LOG, SupervisedJob

PASSED_ON = ("GLOO_", "GOMP_", "HF_HUB_OFFLINE", "KMP_", "MKL_", "NCCL_", "OMP_", "TORCH_", "WHET_TRACEBACK")
"""Prefixes of the environment variables that a process on another node gets from this one."""
OF_SERVERS = ("SGLANG_", "SGL_", "VLLM_")
"""Prefixes of those that a rank gets besides: the controller starts servers with them."""
THREADS = 4
"""Calls that an agent answers at a time: one waits for what happens, a signal or an end must not wait with it."""
MEET = timedelta(minutes=10)
"""Time that a process waits for the others to come."""


def run_on_ray(
    config: ClusterConfig, num_ranks: int, num_engines: int, arguments: Sequence[str], line: str, run_dir: Path, gpus_each: int = 1
) -> int:
    """Run a job of processes that Ray places. Other arguments, result and errors as for `run_local`.

    Args:
        config: the settings.
        num_engines: processes that the controller will start for the engine; 0: none.
        gpus_each: GPUs that each of those computes on, where the cluster has any.

    Raises:
        ValueError: if there is no cluster, or no room in it.
    """
    num_cpus = num_ranks * config.trainer_cpus + num_engines * config.engine_cpus
    with connected(config, num_cpus + abs(num_ranks - num_engines) * max(config.trainer_cpus, config.engine_cpus)) as there:
        ray = there.ray
        planned = plan_room(config, num_ranks, num_engines, ray.cluster_resources().get("GPU", 0), gpus_each)
        name = f"whet-{uuid.uuid4().hex[:8]}"
        with room(ray, planned.bundles, config, name) as group, _rendezvous(there, num_ranks) as rendezvous:
            agents = [agent_in(ray, group, bundle, planned.trainer) for bundle in planned.ranks]
            places: list[ActorPlace] = ray.get([agent.place.remote() for agent in agents], timeout=config.start_timeout_s)
            shared = {
                **{key: value for key, value in os.environ.items() if key.startswith(PASSED_ON + OF_SERVERS)},
                **(on_one_machine(num_ranks) if len({place.host for place in places}) == 1 else {}),
                **rendezvous,
            }
            if planned.engines:
                context = ray.get_runtime_context()
                devices = shared_devices(planned, [place.gpus for place in places])
                of_engine = (planned.engine, planned.engines, places[0].node, devices)
                shared[ROOM] = EngineRoom(context.gcs_address, context.namespace, name, *of_engine).to_text()

            def start(rank: int, on_event: OnEvent) -> Process:
                environment = {**shared, **place_of(rank, 0, num_ranks)}  # a process sees its own GPU alone
                return RayProcess(
                    ray, agents[rank], Command(tuple(arguments), line, environment, os.getcwd()), on_event, config.start_timeout_s
                )

            return SupervisedJob(num_ranks, run_dir / LOG).run(start)


@contextmanager
def _rendezvous(there: Connected, num_ranks: int) -> Iterator[dict[str, str]]:
    """Environment with the place where the processes meet. On this machine alone that is a file, as for
    a local job; on a cluster a store of torch's, here: it has no key, and listens on the one address by
    which the cluster knows this machine."""
    if there.own:
        with rendezvous_file() as environment:
            yield environment
        return
    store = store_at(there.ray.util.get_node_ip_address(), num_ranks)
    yield {
        "MASTER_ADDR": store.host,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the first rank joins the store as the others do
    }


def store_at(host: str, num_ranks: int) -> dist.TCPStore:  # pyright: ignore[reportPrivateImportUsage]
    """A store that listens on this address of this machine's alone, on a port that is free. By itself, torch's listens on all.

    Raises:
        ValueError: if it is none of this machine's.
    """
    try:
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(
            f"the cluster knows this machine as {host}, where the run's processes are to meet, but nothing can listen there "
            f"({error.strerror}): start its node with --node-ip-address set to an address of this machine's own"
        ) from error
    port = listener.getsockname()[1]
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, num_ranks, is_master=True, timeout=MEET, wait_for_workers=False, master_listen_fd=listener.detach()
    )


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
        command: the process to start.
        on_event: called with its output and its end.
        timeout_s: seconds for the actor to be there.

    Raises:
        ray.exceptions.RayError: if it cannot be started.
    """

    def __init__(self, ray: Any, agent: Any, command: Command, on_event: OnEvent, timeout_s: float) -> None:
        self._ray, self._agent, self._on_event = ray, agent, on_event
        self._called = f"({ray.get(agent.start.remote(command), timeout=timeout_s)})"
        threading.Thread(target=self._listen, name=self._called, daemon=True).start()

    def signal(self, number: int) -> None:
        self._agent.signal.remote(number)

    def kill(self) -> None:
        self._agent.kill.remote()

    def _listen(self) -> None:
        ended = False
        try:
            while True:
                for event in self._ray.get(self._agent.next.remote()):
                    if isinstance(event, ProcessExit):
                        ended = True
                        event = ProcessExit(event.code, f"{self._called} {event.how}")
                    self._on_event(event)
                    if isinstance(event, OutputEnd):
                        return
        except self._ray.exceptions.RayError as error:  # with its actor or node the process ends, too
            if not ended:
                why = str(error).strip().split("\n")[0]
                self._on_event(ProcessExit(None, f"{self._called} was lost with its actor: {why}"))
            self._on_event(OutputEnd())
