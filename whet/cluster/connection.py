"""The connection to a Ray cluster, and room in it."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from whet.cluster.config import ClusterConfig
from whet.cluster.head import cluster_here
from whet.cluster.room import Bundle

ANSWER_TIMEOUT_S = 10.0
"""For a cluster's head to take a connection."""


MIN_RAY = (2, 54)
"""Oldest usable version of Ray: earlier agents take jobs from any caller, since they do not check the
cluster's key."""
INSTALL = "pip install -U 'whet[ray]'"


def check_version(found: str) -> None:
    """Refuse to start a cluster of a version that cannot be closed to others.

    Raises:
        ValueError: with what to install.
    """
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_RAY:
        raise ValueError(
            f"the package ray is {found}, whose clusters answer others without their key; for one of its own this run needs "
            f"{MIN_RAY[0]}.{MIN_RAY[1]} or newer; {INSTALL}"
        )


def _version_here() -> str:
    """Ray's, which is not imported yet."""
    try:
        return version("ray")
    except PackageNotFoundError:
        import_ray()  # says how to install it, or knows it by other means
        return str(import_ray().__version__)


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


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection to a cluster."""

    ray: Any
    """The package."""
    own: bool
    """The cluster was started for this run, on this machine."""


@contextmanager
def connected(config: ClusterConfig, num_cpus: float, namespace: str | None = None) -> Iterator[Connected]:
    """Ray, connected to the cluster of the settings, or to one that is started here and ends with the
    block.

    Args:
        config: has its address.
        num_cpus: processors that the run sets apart; a cluster started here has at least this many.
        namespace: namespace of names in the cluster; None: a new one.

    Raises:
        ValueError: if Ray is not installed, or there is no cluster at the address, or none can be
            started here.
    """
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address is not None:
        where = "cluster.address" if config.address is not None else "RAY_ADDRESS"
        ray = import_ray()
        check_reachable(address, where)
        with _joined(ray, address, where, namespace):
            yield Connected(ray, own=False)
        return
    check_version(_version_here())
    cores = max(os.cpu_count() or 1, math.ceil(num_cpus))
    with cluster_here(cores, config.start_timeout_s) as address:
        ray = import_ray()
        take_environment()
        with _joined(ray, address, "the cluster that was started here", namespace, logging_level=logging.WARNING):
            yield Connected(ray, own=True)


@contextmanager
def _joined(ray: Any, address: str, where: str, namespace: str | None, **options: Any) -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, **options)
    except ConnectionError as error:
        raise ValueError(f"{where}: there is no Ray cluster at {address}: {error}") from error
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray takes SIGTERM over, which asks a run to save
            signal.signal(signal.SIGTERM, before)
    try:
        yield
    finally:
        ray.shutdown()


def take_environment() -> None:
    """Have Ray read again what it read of the environment when it was imported, maybe by the user's own code or for an earlier run."""
    from ray import _raylet
    from ray._private import ray_constants

    native: Any = _raylet
    ray_constants.ENABLE_RAY_CLUSTER = os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] != "0"
    native.Config.initialize("")
    native.AuthenticationTokenLoader.instance().reset_cache()


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
    shares: list[str] = []
    for key in ("CPU", "GPU"):
        if wanted := sum(bundle.get(key, 0) for bundle in bundles):
            shares.append(f"{wanted:g} {key}s, of which it has {total.get(key, 0):g} ({free.get(key, 0):g} free)")
    return (
        f"the Ray cluster had no room within {waited_s:g} s: the run wants {' and '.join(shares)}, in {len(bundles)} bundles; lower "
        "train.parallel, engine.embedded.copies, or what [cluster] gives to each process, or add nodes"
    )
