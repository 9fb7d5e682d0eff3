"""vLLM's end of whet's transports of weights: a broadcast, or a folder."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from whet.model.digest import digests_of
from whet.transport.base import BroadcastTicket
from whet.transport.broadcast import BroadcastReceiver


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Names of the server's processes, as the trainer knows them, in the order of their ranks."""

    receivers: list[str]


@dataclass
class TicketInfo(WeightTransferUpdateInfo):
    """A version in a folder, or the fields of `whet.transport.base.BroadcastTicket`."""

    version: int
    folder: str | None = None
    host: str = ""
    port: int = 0
    group: int = 0
    receivers: list[str] = field(default_factory=list)
    backend: str = ""
    timeout_s: float = 0.0


class WhetTransferEngine(WeightTransferEngine[JoinInfo, TicketInfo]):
    """Takes a version's tensors as they come, bucket by bucket, and keeps their digests."""

    init_info_cls = JoinInfo
    update_info_cls = TicketInfo
    _receiver: BroadcastReceiver | None = None

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        config = self.parallel_config
        rank = config.data_parallel_index * config.world_size + config.rank
        self._receiver = BroadcastReceiver(init_info.receivers[rank])
        self.digests: dict[str, str] = {}

    def start_weight_update(self) -> None:
        self.digests = {}
        self._loaded: set[str] | None = set()
        held = self._parameters()
        initialize_layerwise_reload(self.model)
        self._expected = held & self._parameters()  # kernels add some of their own (Marlin's w_zp), and files need not have all (k_scale)

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: TicketInfo) -> None:
        """Load the version of a ticket.

        Raises:
            TransportError: if it does not arrive.
            ValueError: if the folder is not seen here, or a parameter of the model got nothing; the others are loaded then.
        """
        if self._receiver is None:
            raise ValueError("/init_weight_transfer_engine comes before the first update")
        with closing(self._arriving(update_info)) as arriving:
            for name, tensor in self._digested(arriving):
                loaded = self.model.load_weights([(name, tensor.to(self.device, copy=True))])
                self._loaded = None if loaded is None or self._loaded is None else self._loaded | set(loaded)
        if self._loaded is not None and (missing := sorted(self._expected - self._loaded)):
            raise ValueError(f"version {update_info.version}: {len(missing)} parameters got no weights, the first {', '.join(missing[:5])}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            self._pack_tied_head()

    def _parameters(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters()}

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def _arriving(self, info: TicketInfo) -> Iterator[tuple[str, Tensor]]:
        if info.folder is not None:
            files = sorted(Path(info.folder).glob("*.safetensors"))
            if not files:
                why = "sync.folder must lie on a file system that the trainer and the servers share"
                raise ValueError(f"version {info.version}: {info.folder} is not to be seen on {socket.gethostname()}; {why}")
            for file in files:
                yield from load_file(file).items()
            return
        assert self._receiver is not None, "checked before"
        fields = {name: value for name, value in vars(info).items() if name != "folder"}
        yield from self._receiver.open(BroadcastTicket(**{**fields, "receivers": tuple(info.receivers)}))

    def _digested(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            self.digests |= digests_of([(name, tensor)])
            yield name, tensor

    def _pack_tied_head(self) -> None:
        """Pack a tied output head anew: on CPUs vLLM computes with a packed copy, which a reload leaves as it was."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        head = getattr(self.model, "lm_head", None)
        if isinstance(head, torch.nn.Module) and hasattr(head, "cpu_linear") and head.weight.numel():
            dispatch_cpu_unquantized_gemm(head, remove_weight=False)
