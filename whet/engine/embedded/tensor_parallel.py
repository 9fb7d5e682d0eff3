"""One engine over several processes: each holds its part of every layer, rank 0 plans and samples,
the others repeat each of its steps.

Rank 0 announces every change to its core before it makes it, in a few bytes over a pipe, so
that all ranks plan the same steps. Layers exchange activations as the model's own plan says; only the
first rank draws tokens. A rank that loses another, or gets an unexpected message, ends: ranks that are
out of step never compute.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from whet.calls.messages import RemoteCall, RemoteResult
from whet.calls.methods import Target, invoke, methods_of
from whet.engine.base import StaleCache
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.lockstep import Lockstep
from whet.engine.embedded.logits import Drawn
from whet.engine.embedded.scheduler import Sequence as Running
from whet.model.causal import CausalModel
from whet.model.digest import digests_of
from whet.model.parallel_plan import apply_plans
from whet.model.shards import whole
from whet.transport.apply import copy_weights
from whet.transport.base import Stream, Ticket
from whet.transport.receive import Receiver
from whet.types import Request, SamplingParams

KEY = "engine.embedded.tensor_parallel"
TIMEOUT_S = 300.0
"""For an exchange between ranks. One that dies is noticed at once."""
LOST = 3
"""The exit status of a rank that ends because another one did."""


class RankZero:
    """The side of rank 0.

    Args:
        pipes: a pipe to each of the others, in their order.
    """

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def broadcast(self, method: str, *arguments: object) -> None:
        if method == "add":
            arguments = (_bare(*arguments),)  # pyright: ignore[reportArgumentType]
        self._send(RemoteCall(RANK if method in methods_of(RankCalls) else CORE, method, arguments))

    def drawn(self, draw: Callable[[], list[Drawn]]) -> list[Drawn]:
        try:
            found = draw()
        except Exception:
            self._send(RemoteResult())
            raise
        self._send(RemoteResult([each.token for each in found]))
        return found

    def digests(self, model: CausalModel) -> dict[str, str]:
        self.broadcast("digests")
        held = digests_of((name, whole(tensor)) for name, tensor in model.named_state())
        for pipe in self._pipes:
            held |= {name: digest for name, digest in pipe.recv().items() if digest != held[name]}
        return held

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, StaleCache):
            raise
        except Exception:
            traceback.print_exc()
            os._exit(LOST)

    def _send(self, message: object) -> None:
        for pipe in self._pipes:
            pipe.send(message)


class NothingDrawn(Exception):
    """Rank 0 could not draw in a step that was computed."""


class OtherRank:
    """The side of another rank.

    Args:
        first: a pipe to rank 0.
    """

    def __init__(self, first: Connection) -> None:
        self._first = first

    def broadcast(self, method: str, *arguments: object) -> None:
        pass

    def drawn(self, draw: Callable[[], list[Drawn]]) -> list[Drawn]:
        drawn = self._first.recv()
        assert isinstance(drawn, RemoteResult), f"the ranks of an engine are out of step: rank 0 sent {drawn} in place of drawn tokens"
        if drawn.value is None:
            raise NothingDrawn
        return [Drawn(token, 0.0, b"", None) for token in drawn.value]

    def digests(self, model: CausalModel) -> dict[str, str]:
        mine = digests_of((name, tensor) for name, tensor in model.named_state() if not isinstance(tensor, DTensor))
        for _, tensor in model.named_state():
            whole(tensor)  # all ranks put each together
        self._first.send(mine)
        return mine

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def serve_calls(self, core: EngineCore, receiver: Receiver) -> None:
        """Make rank 0's calls until it is gone.

        Args:
            core: the core of this rank.
            receiver: opens the tickets to new weights.
        """
        targets = {CORE: Target(core, EngineCore), RANK: Target(RankCalls(core, receiver, self), RankCalls)}
        while True:
            try:
                call = self._first.recv()
            except (EOFError, OSError):
                return
            assert isinstance(call, RemoteCall), f"the ranks of an engine are out of step: rank 0 sent {call} in place of a call"
            with suppress(StaleCache, NothingDrawn):  # rank 0 has the same error, and says what is next
                invoke(targets, call)


CORE, RANK = "core", "rank"
"""Targets of rank 0's calls: an `EngineCore`, `RankCalls`."""


class RankCalls:
    """Calls that another rank makes otherwise than rank 0.

    Args:
        core: the core of this rank.
        receiver: opens the tickets to new weights.
        side: this rank's side of the pipe.
    """

    def __init__(self, core: EngineCore, receiver: Receiver, side: OtherRank) -> None:
        self._core, self._receiver, self._side = core, receiver, side
        self._sequences: dict[int, Running] = {}

    def add(self, request: Request) -> None:
        added = self._core.add(request)
        self._sequences[added.arrival] = added

    def finish(self, arrival: int) -> None:
        self._core.finish(self._sequences.pop(arrival))

    def take(self, ticket: Ticket) -> None:
        copy_weights(dict(self._core.model.named_weights()), Stream(self._receiver.open(ticket)), digest=False)

    def digests(self) -> None:
        self._side.digests(self._core.model)


def _bare(request: Request) -> Request:
    """The request without sampling options, for ranks that draw nothing."""
    return replace(request, sampling=SamplingParams(request.sampling.max_tokens), conversation="")


@dataclass(frozen=True, slots=True)
class Links:
    """Links of a rank to the others."""

    store: Path
    """A file that they meet in."""
    num: int
    rank: int
    pipes: tuple[int, ...]
    """Descriptors: of rank 0, its pipes to the others; of another one, its pipe to rank 0."""

    def join(self, device: str) -> Lockstep:
        """Wait for all ranks."""
        backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
        timeout = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group(backend, init_method=f"file://{self.store}", rank=self.rank, world_size=self.num, timeout=timeout)
        pipes = [Connection(pipe) for pipe in self.pipes]
        return RankZero(pipes) if self.rank == 0 else OtherRank(pipes[0])


def check_split(model: CausalModel, num: int) -> None:
    """Check that a model's layers can be cut over `num` ranks.

    Raises:
        ValueError: with the model's name and the reason.
    """
    text, name = model.config.get_text_config(), type(model.hf).__name__
    if not text.base_model_tp_plan:
        raise ValueError(f"{KEY}: transformers has no plan to cut {name} by; set it to 1")
    if text.num_attention_heads % num or text.num_key_value_heads % num:
        raise ValueError(
            f"{KEY} is {num}, but {name} has {text.num_attention_heads} heads and {text.num_key_value_heads} of keys and values, which "
            f"{num} ranks cannot share; lower it to a divisor of both"
        )


def keep_part(model: CausalModel, device: str) -> None:
    """Cut a model over the ranks that joined, in place: this rank keeps its part of each layer, in its
    own memory on its device."""
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),), mesh_dim_names=("tensor",))
    apply_plans(model.hf, mesh, None, split_head=False, key=KEY)
    for module in model.hf.modules():
        for tensor in module.parameters(recurse=False):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device, copy=True)
        for name, tensor in module.named_buffers(recurse=False):
            module._buffers[name] = tensor.to(device, copy=True)
