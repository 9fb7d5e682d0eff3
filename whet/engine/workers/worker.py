"""One copy of the engine, in a process of its own: `python -m whet.engine.workers.worker FD`, FD being its end of a socket, or `dial`."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator
from functools import cache
from multiprocessing.connection import Connection

import torch
from torch import Tensor, nn

from whet.calls.methods import Target
from whet.calls.pipe import CallServer
from whet.engine.embedded.core import NO_TOKENIZER, EngineCore
from whet.engine.embedded.engine import EmbeddedEngine
from whet.engine.embedded.tensor_parallel import LOST, Links, OtherRank, keep_part
from whet.engine.pool.member import EngineCalls, WeightCalls
from whet.engine.workers.dialing import Invitation
from whet.engine.workers.first_weights import fetch
from whet.engine.workers.processes import ENGINE, WEIGHTS
from whet.engine.workers.setup import Setup
from whet.model.causal import CausalModel, torch_thread, use_device
from whet.model.meta import copied_to, without_contents
from whet.model.naming import Naming
from whet.model.shared import attach
from whet.runfolder.stacks import say_on_signal
from whet.transport.base import Stream, Ticket
from whet.transport.receive import Receiver
from whet.types import Receipt


class Copy:
    """An embedded engine at the end of a connection. It calls `FirstWeights` as it starts, sends the engine's
    capabilities when it is ready, and serves calls from then on.
    """

    def __init__(self, connection: Connection, setup: Setup) -> None:
        self._connection = connection
        weights = fetch(setup.model, connection) if setup.elsewhere else attach(setup.model)
        shared = setup.mapped and setup.links is None and torch.device(setup.device) == torch.device("cpu")
        ranks = None if setup.links is None else setup.links.join(setup.device)
        model = weights if shared else _on_device(weights, setup)
        self._engine = EmbeddedEngine(
            model,
            setup.config,
            torch_thread("engine", torch.device(setup.device)),
            shares_weights=shared,
            deterministic=setup.deterministic,
            keeps_weights=setup.keeps_weights,
            tokenizer=NO_TOKENIZER if setup.tokenizer is None else setup.tokenizer.load(model.vocab_size),
            ranks=ranks,
        )
        self._receiver = _receiver(setup, weights, model)

    async def serve(self) -> None:
        """Serve calls until none follows, or the other end is gone."""
        self._connection.send(self._engine.capabilities)
        targets = {ENGINE: Target(self._engine, EngineCalls), WEIGHTS: Target(self, WeightCalls)}
        await CallServer(self._connection, targets, lambda: os._exit(0)).serve()  # a step may be under way, for nobody
        await self._engine.close()

    async def update(self, ticket: Ticket, version: int) -> Receipt:
        """Take over the weights of a ticket."""
        self._receiver.check(ticket, self._engine.held)
        arriving = self._arriving(ticket)
        try:
            return await self._engine.update(Stream(arriving), version)
        finally:
            arriving.close()  # the sender need not wait for an engine that reads no further

    def _arriving(self, ticket: Ticket) -> Generator[tuple[str, Tensor]]:
        """Read between two steps, by all ranks at once."""
        self._engine.core.ranks.broadcast("take", ticket)
        yield from self._receiver.open(ticket)


def _receiver(setup: Setup, weights: CausalModel, model: CausalModel) -> Receiver:
    """The receiver of weights for this process.

    Args:
        weights: whole, over the shared memory if it is mapped.
        model: the model whose tensors this process samples from.
    """
    bare = without_contents(weights)
    return Receiver(
        setup.name, weights if setup.mapped else None, lambda: dict(model.named_weights()), cache(lambda: Naming(bare))
    )


def _on_device(weights: CausalModel, setup: Setup) -> CausalModel:
    """A copy of a model on another device, or this rank's part of it."""
    if setup.links is not None:
        model = attach(setup.model)
        keep_part(model, setup.device)
        return model
    if setup.elsewhere:
        nn.Module.to(weights.hf, torch.device(setup.device))
        return weights
    return copied_to(weights, torch.device(setup.device))


def serve_rank(connection: Connection, setup: Setup, links: Links) -> None:
    """Make the calls of rank 0, as another rank, until that one is gone."""
    weights = attach(setup.model)
    rank = links.join(setup.device)
    assert isinstance(rank, OtherRank)
    model = _on_device(weights, setup)
    core = EngineCore(model, setup.config, ranks=rank)
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        rank.serve_calls(core, _receiver(setup, weights, model))
    except (RuntimeError, EOFError, OSError):  # of an exchange with a rank that is gone; torch's are RuntimeErrors
        traceback.print_exc()
        os._exit(LOST)
    os._exit(0)  # the process group would wait for the others


def _end_with(connection: Connection) -> None:
    """The trainer's process says nothing to it: when it is heard of, it is gone."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os._exit(0)


def work(connection: Connection) -> None:
    """The process: set up, serve, end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
    faulthandler.enable()
    say_on_signal()
    setup: Setup = connection.recv()
    torch.set_num_threads(setup.threads)
    use_device(torch.device(setup.device))
    if setup.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(setup.deterministic)
    if setup.links is not None and setup.links.rank:
        serve_rank(connection, setup, setup.links)
    asyncio.run(Copy(connection, setup).serve())
    if setup.links is not None:
        os._exit(0)  # the process group would wait for the others


def dial(invitation: Invitation) -> None:
    """Turn this process into a worker, until the inviting process ends it. Call it from the main
    thread.

    Raises:
        OSError, AuthenticationError: as `Invitation.accept`.
    """
    work(invitation.accept())


if __name__ == "__main__":
    work(Connection(int(sys.argv[1])))
