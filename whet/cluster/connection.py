"""The connection to a Ray cluster, and room in it."""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from whet.cluster.config import ClusterConfig
from whet.cluster.room import Bundle

ANSWER_TIMEOUT_S = 10.0
"""For a cluster's head to take a connection."""
STORE_BYTES = 100_000_000
"""Of the object store of a cluster that is started here: nothing large goes through it."""


def import_ray() -> Any:
    """The package.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError(f"cluster.backend=ray needs the package {error.name}: pip install 'whet[ray]'") from error
    return ray


@contextmanager
def connected(config: ClusterConfig, num_cpus: float, namespace: str | None = None) -> Iterator[Any]:
    """Ray, connected to the cluster of the settings, or to one that is started here and ends with the block.

    Args:
        config: where it is.
        num_cpus: processors that the run sets apart; a cluster that is started here counts so many at least.
        namespace: of names in the cluster; none: a new one.

    Raises:
        ValueError: if there is no Ray, or no cluster at the address.
    """
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        private_cluster(os.environ)  # before the import, which reads them
    ray = import_ray()
    where = "cluster.address" if config.address is not None else "RAY_ADDRESS"
    if address is not None:
        check_reachable(address, where)
    before = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            cores = max(os.cpu_count() or 1, math.ceil(num_cpus))
            ray.init(address="local", num_cpus=cores, include_dashboard=False, log_to_driver=False, object_store_memory=STORE_BYTES)
        else:
            ray.init(address=address, namespace=namespace, log_to_driver=False)
    except ConnectionError as error:
        raise ValueError(f"{where}: there is no Ray cluster at {address}: {error}") from error
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray takes SIGTERM over, which asks a run to save
            signal.signal(signal.SIGTERM, before)
    try:
        yield ray
    finally:
        ray.shutdown()


def check_reachable(address: str, where: str) -> None:
    """Refuse an address at which nobody answers: Ray would try for minutes.

    Args:
        address: auto, which Ray looks up on this machine, or HOST:PORT.
        where: it was set, for the error.

    Raises:
        ValueError: if it is none, or nobody answers there.
    """
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        raise ValueError(f"{where} is {address!r}; give auto, or HOST:PORT of the cluster's head (`ray start --head` prints it)")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT_S).close()
    except OSError as error:
        raise ValueError(f"{where}: there is no Ray cluster at {address}: {error.strerror or error}") from error


def private_cluster(environment: MutableMapping[str, str]) -> None:
    """Settings of a cluster that is this run's alone: nobody without its key may use it, and it reports to nobody. What is set already
    stays."""
    environment.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if environment.get("RAY_AUTH_MODE", "token") != "token":
        return
    if "ray" not in sys.modules:  # else Ray turns it on as it starts the cluster
        environment["RAY_AUTH_MODE"] = "token"
    if "RAY_AUTH_TOKEN_PATH" not in environment:
        environment.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextmanager
def room(ray: Any, bundles: Sequence[Bundle], config: ClusterConfig, name: str) -> Iterator[Any]:
    """Resources that are set apart for the block: Ray's placement group.

    Raises:
        ValueError: if the cluster has no room for them in time.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(bundle) for bundle in bundles], strategy="PACK", name=name)
    try:
        if not group.wait(config.start_timeout_s):
            raise ValueError(_no_room(ray, bundles, config.start_timeout_s))
        yield group
    finally:
        remove_placement_group(group)


def _no_room(ray: Any, bundles: Sequence[Bundle], waited_s: float) -> str:
    total, free = ray.cluster_resources(), ray.available_resources()
    told: list[str] = []
    for key in ("CPU", "GPU"):
        if wanted := sum(bundle.get(key, 0) for bundle in bundles):
            told.append(f"{wanted:g} {key}s, of which it has {total.get(key, 0):g} ({free.get(key, 0):g} free)")
    return (
        f"the Ray cluster had no room within {waited_s:g} s: the run wants {' and '.join(told)}, in {len(bundles)} bundles; lower "
        "train.parallel, engine.embedded.copies, or what [cluster] gives to each process, or add nodes"
    )
