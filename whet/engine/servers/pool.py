"""Servers as one engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from whet.engine.base import SCORE_TOLERANCE
from whet.engine.embedded.stops import Decode
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import OnIncident, Slot, StartMember
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.weights import WeightSync
from whet.engine.servers.behind_router import ServersBehindRouter
from whet.engine.servers.config import ServersConfig
from whet.engine.servers.devices import VISIBLE, assign_devices, chosen_by_user, trainer_devices, visible_devices
from whet.engine.servers.hosts import LOOPBACK, LocalHost, ServerHosts, local_host
from whet.engine.servers.kinds import KINDS
from whet.engine.servers.member import ServerMember
from whet.engine.servers.start import ServerAt, ServerStarter
from whet.engine.vllm.start import LORA_ARGS, RANKS, Vllm
from whet.model.causal import CausalModel
from whet.model.config import LoraConfig
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.model.quantization import Quantization, in_format
from whet.transport.adapter import AdapterWriter
from whet.transport.quantize import QuantizingStream
from whet.transport.senders import adapter_sender_of, server_sender_of
from whet.transport.settings import Syncing

Start = StartMember[ServerMember]


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers that settings ask for."""

    config: ServersConfig
    folder: Path
    """Folder of the model and its tokenizer."""
    decode: Decode
    tells_routes: bool = False
    """True if requests ask for experts."""
    quantization: Quantization | None = None
    """Format of the weights that they hold; None: the trainer's type."""
    lora: LoraConfig | None = None
    """The adapter that updates bring; None: they bring whole weights."""

    def starts(
        self, model: CausalModel, pool: PoolConfig, hosts: ServerHosts = local_host, versions: Path | None = None
    ) -> dict[str, Start]:
        """A start of each server, by its name.

        Args:
            model: the trainer's.
            pool: deadlines.
            hosts: finds the machine of a server that is started.
            versions: folder of the versions that it is to load; None: weights come over the network.
        """
        kind = KINDS[self.config.name] if self.lora is None else Vllm(adapters=True)
        direct = direct_names(model) if self.quantization is None else names_in_format(model, self.quantization)
        names = self.config.names
        if self.config.router is not None:
            behind, name = dict(zip(names, self.config.urls, strict=True)), f"{kind.name} router"
            tolerance = SCORE_TOLERANCE[model.dtype]
            at = ServersBehindRouter(kind, name, self.config.router, behind, self.decode, direct, tolerance, pool.start_timeout_s)
            return {name: at}
        if self.config.urls:
            pairs = zip(names, self.config.urls, strict=True)
            return {name: ServerAt(kind, name, url, self.decode, direct, pool.start_timeout_s) for name, url in pairs}
        args = {**({"enable_return_routed_experts": True} if self.tells_routes else {}), **self.config.args}
        if self.lora is None:  # weights come whole, as those of a trained adapter in an evaluation
            args = {name: value for name, value in args.items() if name.replace("-", "_") not in LORA_ARGS}
        else:
            args = {"max_lora_rank": least_rank(self.lora.rank)} | args
        return {
            name: ServerStarter(
                kind=kind,
                name=name,
                python=self.config.python,
                folder=self.folder,
                dtype=str(model.dtype).removeprefix("torch."),
                args=args,
                decode=self.decode,
                direct_names=direct,
                timeout_s=pool.start_timeout_s,
                hosts=hosts,
                num_nodes=self.config.nodes_each,
                versions=versions,
            )
            for name in names
        }


@dataclass(frozen=True, slots=True)
class ServerSites:
    """The machines that servers are on."""

    hosts: ServerHosts
    """Finds the machine of a server that is started."""
    address: str
    """This machine's, as the servers know it."""
    share_gpus: bool = False
    """True if a server computes on a GPU of the trainer's."""


def sites_here(servers: ServersConfig, device: torch.device, environment: Mapping[str, str] = os.environ) -> ServerSites:
    """This machine, with GPUs of its own for each server.

    Args:
        servers: servers that whet starts.
        device: the trainer's.
        environment: of the controller.

    Raises:
        ValueError: if the servers need more GPUs than this process may use.
    """
    count, kind = torch.cuda.device_count(), servers.name
    trainer = trainer_devices(device.type, device.index, environment)
    if chosen_by_user(kind, servers.args, environment):
        return ServerSites(local_host, LOOPBACK, share_gpus=0 < count <= len(trainer))
    visible = visible_devices(environment.get(VISIBLE), count)
    assigned = assign_devices(servers.num_servers, servers.gpus_each, visible, trainer, kind)
    devices = dict(zip(servers.names, assigned.devices, strict=True))
    return ServerSites(lambda name, _: LocalHost(devices[name]), LOOPBACK, assigned.shared)


def direct_names(model: CausalModel) -> frozenset[str] | None:
    """Names of the weights, if files call and cut them as the model does; None: they do not, as those of experts."""
    naming = Naming(without_contents(model))
    names = frozenset(naming.parameters)
    return names if all(list(naming.files[name]) == [name] for name in names) else None


def names_in_format(model: CausalModel, quantization: Quantization) -> frozenset[str]:
    """Names of all tensors that are sent.

    Raises:
        ValueError: if the checkpoint that the format is of has other tensors.
    """
    naming = Naming(without_contents(model))
    files = ((file, part) for name, tensor in naming.parameters.items() for file, part in naming.to_files(name, tensor))
    try:
        return frozenset(name for name, _ in in_format(files, quantization))
    except ValueError as error:
        raise ValueError(f"engine.quantization: {error}") from error


def servers_engine(
    servers: Servers, model: CausalModel, pool: PoolConfig, sync: Syncing, sites: ServerSites, on_incident: OnIncident
) -> EnginePool[ServerMember]:
    """Start the servers, or connect to them, all at once.

    Args:
        servers: the servers.
        model: the trainer's; its shapes and names alone are used.
        pool: deadlines and restarts.
        sync: transport of weights.
        sites: the machines that they are on.
        on_incident: called for each server that is lost.

    Raises:
        EngineFailed: if one of them does not start, or lacks what whet needs.
        ValueError: if weights cannot reach them.
    """
    bare = without_contents(model)
    starts = servers.starts(model, pool, sites.hosts, None if sync.config.transport == "broadcast" else sync.versions)
    if servers.lora is not None:
        sender = adapter_sender_of(sync.config, sync.folder, AdapterWriter(model, servers.lora, servers.folder))
        return _pool_of(starts, WeightSync(sender, {}), pool, on_incident, SCORE_TOLERANCE[model.dtype])
    own_routes, backend = KINDS[servers.config.name].own_routes, "nccl" if model.device.type == "cuda" else "gloo"
    if own_routes and sync.config.transport == "broadcast":
        check_devices(backend, sites)
    sender = server_sender_of(sync.config, bare, sync.folder, sites.address, backend if own_routes else None, servers.quantization)
    quantize = None if servers.quantization is None else partial(QuantizingStream, naming=Naming(bare), quantization=servers.quantization)
    weights = WeightSync(sender, dict(bare.named_weights()), quantize)
    nats = 0.0 if servers.quantization is None else servers.quantization.nats
    return _pool_of(starts, weights, pool, on_incident, SCORE_TOLERANCE[model.dtype], nats)


def _pool_of(
    starts: Mapping[str, Start], weights: WeightSync, pool: PoolConfig, on_incident: OnIncident, tolerance: float, nats: float = 0.0
) -> EnginePool[ServerMember]:
    members = start_all(starts)
    slots = [Slot(name, start, members[name], breaker_of(pool)) for name, start in starts.items()]
    return EnginePool(slots, weights, pool, deterministic=False, on_incident=on_incident, tolerance=tolerance, quantization_nats=nats)


def least_rank(rank: int) -> int:
    """The smallest `max_lora_rank` of vLLM's that holds adapters of a rank.

    Raises:
        ValueError: if there is none.
    """
    fits = [each for each in RANKS if each >= rank]
    if not fits:
        raise ValueError(f"train.lora.rank is {rank}, and vLLM takes at most {RANKS[-1]}: leave enable_lora (engine.vllm.args) out")
    return fits[0]


def check_devices(backend: str, sites: ServerSites) -> None:
    """Refuse a broadcast over NCCL between processes that share a GPU: it would wait forever.

    Args:
        backend: of the broadcast.
        sites: the machines that the servers are on.

    Raises:
        ValueError: if a server that whet starts computes on a GPU of the trainer's.
    """
    if backend == "nccl" and sites.share_gpus:
        raise ValueError(
            "sync.transport=broadcast sends over NCCL, which needs a GPU for the trainer and others for engine.servers, and they share "
            "GPUs: set sync.transport=disk, fewer engine.servers, or cluster.layout=disaggregate on a cluster"
        )


def start_all(starts: Mapping[str, Start]) -> dict[str, ServerMember]:
    """All at once; when one does not start the others are ended.

    Raises:
        EngineFailed: error of the first that does not start.
    """
    given_up = threading.Event()
    with ThreadPoolExecutor(len(starts), "start") as threads:
        starting = {name: threads.submit(start, given_up) for name, start in starts.items()}
        try:
            return {name: each.result() for name, each in starting.items()}
        except BaseException:
            given_up.set()
            for each in starting.values():
                if each.exception() is None:
                    each.result().stop()
            raise
