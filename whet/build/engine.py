"""Engines from `[engine]`: in this process, or in several."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

import torch

from whet.cluster.config import ClusterConfig
from whet.cluster.ray_servers import ray_sites
from whet.data.hub import HUB_NAME, resolve_model_path
from whet.engine.base import Engine
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.embedded.engine import EmbeddedEngine
from whet.engine.embedded.stops import Decode
from whet.engine.embedded.tokenizer import EngineTokenizer, TokenizerFolder
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import OnIncident
from whet.engine.pool.pool import print_incident
from whet.engine.servers.config import ServersConfig
from whet.engine.servers.hosts import local_host
from whet.engine.servers.pool import Servers, ServerSites, servers_engine, sites_here
from whet.engine.workers.copies import EngineCopies
from whet.engine.workers.launch import Launcher
from whet.model.causal import CausalModel, pick_device
from whet.model.config import LoraConfig, ModelConfig
from whet.model.quantization import OwnFormat, Quantization
from whet.model.quantization_folder import checkpoint_format, named_format, quantize_folder
from whet.transport.settings import Syncing


def engine_model(config: ModelConfig, sizes: EmbeddedConfig, *, apart: bool = False) -> ModelConfig:
    """Settings of an engine's own model. Copies hold theirs in the CPU's memory, on any device. `apart`: true
    if even a single engine is a process of its own.
    """
    return config if sizes.num_processes == 1 and not apart else config.model_copy(update={"device": "cpu"})


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine that settings ask for."""

    model: ModelConfig
    sizes: EmbeddedConfig
    pool: PoolConfig
    folder: Path
    """Folder of the tokenizer."""
    deterministic: bool = False
    sync: Syncing | None = None
    """Transport of new weights to an engine in other processes; None: through memory."""
    routes: bool = False
    """True if its servers tell the experts that tokens went to."""


@contextmanager
def build_engine(
    spec: EngineSpec,
    model: CausalModel,
    tokenizer: EngineTokenizer,
    thread: Executor,
    *,
    shares_weights: bool,
    launcher: Launcher | None = None,
    on_incident: OnIncident = print_incident,
) -> Iterator[Engine]:
    """Build an engine; its processes end with it. The caller closes it.

    Args:
        spec: what the settings say.
        model: model that it samples from; made by `engine_model`, unless it is the trainer's.
        tokenizer: finds stop texts and reads grammars, in this process.
        thread: thread of the steps of an engine in this process.
        shares_weights: true if the model is the trainer's.
        launcher: starts its processes elsewhere, even a single one; None: here.
        on_incident: called when one of its processes dies.
    """
    sizes, deterministic = spec.sizes, spec.deterministic
    if sizes.num_processes == 1 and launcher is None:
        yield EmbeddedEngine(model, sizes, thread, shares_weights=shares_weights, deterministic=deterministic, tokenizer=tokenizer)
        return
    devices = copy_devices(sizes, spec.model) if launcher is None else placed_devices(sizes, spec.model)
    copies = EngineCopies(
        model,
        sizes.model_copy(update={"copy_devices": devices}),
        deterministic=deterministic,
        tokenizer=TokenizerFolder(spec.folder, spec.model.trust_remote_code),
        sync=spec.sync,
        launcher=launcher,
        pool=spec.pool,
        on_incident=on_incident,
    )
    try:
        yield copies
    finally:
        copies.end()


@contextmanager
def server_sites(servers: ServersConfig, device: torch.device, cluster: ClusterConfig | None) -> Iterator[ServerSites]:
    """The machines that servers are on, until the block ends.

    Args:
        servers: the servers.
        device: the trainer's.
        cluster: settings of the cluster that places the processes of this run; None: they are on this machine.

    Raises:
        ValueError: if there are too few GPUs, or the cluster cannot be reached from here.
    """
    if servers.urls:
        yield ServerSites(local_host, address_of(servers.urls))
    elif cluster is not None and cluster.backend == "ray":
        with ray_sites(cluster) as sites:
            yield sites
    else:
        yield sites_here(servers, device)


@contextmanager
def build_servers(
    spec: EngineSpec,
    servers: ServersConfig,
    sites: ServerSites,
    model: CausalModel,
    decode: Decode,
    on_incident: OnIncident = print_incident,
    lora: LoraConfig | None = None,
) -> Iterator[Engine]:
    """Build an engine of servers; those that were started here end with it. The caller closes it.

    Args:
        spec: what the settings say.
        servers: the servers that they ask for.
        sites: the machines that those are on.
        model: the trainer's, for its names and shapes.
        decode: token ids to text.
        on_incident: called when a server is lost.
        lora: the adapter that trains, which servers get alone if they take adapters; None: the model trains whole, or not.
    """
    assert spec.sync is not None, "servers have their weights from a trainer"
    folder, quantization = (spec.folder, None) if servers.quantization is None else model_in_format(servers, spec, model.dtype)
    asked = Servers(servers, folder, decode, spec.routes, quantization, lora if servers.takes_adapters else None)
    engine = servers_engine(asked, model, spec.pool, spec.sync, sites, on_incident)
    try:
        yield engine
    finally:
        engine.end()


def model_in_format(servers: ServersConfig, spec: EngineSpec, dtype: torch.dtype) -> tuple[Path, Quantization]:
    """Folder of the model that quantized servers start with, and its format. Where no checkpoint is named, it is written first.

    Raises:
        ValueError: if weights cannot be written in the format.
    """
    name = servers.quantization
    assert name is not None and spec.sync is not None, "servers have their weights from a trainer"
    checkpoint, quantization = quantization_of(name, spec.folder)
    if checkpoint is not None:
        return checkpoint, quantization
    out = spec.sync.folder.absolute() / "quantized"
    if not servers.urls:
        try:
            quantize_folder(spec.folder, out, quantization, dtype, spec.sync.config.max_buffer_bytes)
        except ValueError as error:
            raise ValueError(f"engine.quantization={name}: {error}") from error
    return out, quantization


def quantization_of(name: str, folder: Path) -> tuple[Path | None, Quantization]:
    """The format that `engine.quantization` names for the model in a folder, and the checkpoint that it is taken from; None: from none.

    Raises:
        ValueError: if there is none of this name, or weights cannot be written in it.
    """
    if name in get_args(OwnFormat):
        checkpoint = None
    elif Path(name).expanduser().is_dir() or HUB_NAME.fullmatch(name):
        checkpoint = resolve_model_path(name)
    else:
        raise ValueError(f"engine.quantization is {name!r}: write fp8, int4, or a quantized checkpoint's folder or hub name (owner/name)")
    try:
        return checkpoint, named_format(name, folder) if checkpoint is None else checkpoint_format(checkpoint)
    except ValueError as error:
        raise ValueError(f"engine.quantization={name}: {error}") from error


def address_of(urls: Sequence[str]) -> str:
    """This machine's address as all of some servers can reach it: that on the way to one elsewhere, if there is any.

    Raises:
        ValueError: if there is no way to one.
    """
    found = [_address_to(url) for url in urls]
    return next((address for address in found if not ip_address(address).is_loopback), found[0])


def _address_to(url: str) -> str:
    """This machine's address on the way to a server; nothing is sent."""
    try:
        places = socket.getaddrinfo(urlsplit(url).hostname, 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, place = min(places, key=lambda each: each[0] != socket.AF_INET)
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ValueError(f"engine.urls: there is no way to {url}: {error.strerror or error}") from error


def copy_devices(sizes: EmbeddedConfig, config: ModelConfig) -> list[str]:
    """Device of each process of the engine, those of the first copy first.

    Raises:
        ValueError: if a device is not there, or they are fewer than copies.
    """
    if sizes.copy_devices:
        return [str(pick_device(name, "engine.embedded.copy_devices")) for name in sizes.copy_devices]
    device = pick_device(config.device)
    if device.type != "cuda":
        return [device.type] * sizes.num_processes
    if sizes.num_processes > torch.cuda.device_count():
        wanted = f"copies is {sizes.copies}" + (f" of {sizes.tensor_parallel} (tensor_parallel)" if sizes.tensor_parallel > 1 else "")
        raise ValueError(
            f"engine.embedded.{wanted}, but torch sees {torch.cuda.device_count()} CUDA devices; lower it, or name a "
            "device for each in engine.embedded.copy_devices"
        )
    return [f"cuda:{i}" for i in range(sizes.num_processes)]


def placed_devices(sizes: EmbeddedConfig, config: ModelConfig) -> list[str]:
    """Devices of processes that are started elsewhere: each sees its own device alone.

    Raises:
        ValueError: if the settings name devices of this machine.
    """
    if sizes.copy_devices:
        raise ValueError(
            f"engine.embedded.copy_devices names {', '.join(sizes.copy_devices)}, but the cluster gives each process its device: leave it "
            "out, and set cluster.engine_gpus"
        )
    return [pick_device(config.device).type] * sizes.num_processes
