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
from collections.abc import Callable, Coroutine, Generator
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from whet.data.template import Renderer, load_tokenizer
from whet.engine.base import EngineFailed, EngineRefused, StaleCache
from whet.engine.embedded.core import EngineCore
from whet.engine.embedded.engine import EmbeddedEngine
from whet.engine.embedded.grammar import Grammars
from whet.engine.embedded.tensor_parallel import LOST, Follower, Links, keep_part
from whet.engine.workers.dialing import Invitation
from whet.engine.workers.first_weights import fetch
from whet.engine.workers.setup import Setup
from whet.model.causal import CausalModel, torch_thread, use_device
from whet.model.meta import copied_to, without_contents
from whet.model.naming import Naming
from whet.model.shared import attach
from whet.runfolder.stacks import say_on_signal
from whet.transport.base import OtherBase, Stream, Ticket, TransportError
from whet.transport.receive import Receiver
from whet.types import Receipt, Request

KNOWN = (EngineRefused, EngineFailed, StaleCache, TransportError, OtherBase, ValueError)
"""Errors that a caller may need to tell apart; any other becomes an `EngineFailed` with its message."""


class Copy:
    """An embedded engine at the end of a connection.

    Messages in: ("tell", method, arguments), ("call", number, method, arguments), ("generate", number, request), ("drop", number).
    Messages out: what `first_weights.fetch` says, then ("ready", capabilities), then (number, answer): what a call returned, a chunk, or an
    error to raise.
    """

    def __init__(self, connection: Connection, setup: Setup) -> None:
        self._connection = connection
        weights = fetch(setup.model, connection) if setup.elsewhere else attach(setup.model)
        shared = setup.mapped and setup.links is None and torch.device(setup.device) == torch.device("cpu")
        ranks = None if setup.links is None else setup.links.join(setup.device)
        model = weights if shared else _beside(weights, setup)
        decode = grammars = None
        if setup.tokenizer is not None:
            tokenizer = load_tokenizer(setup.tokenizer, trust_remote_code=setup.trust_remote_code)
            renderer = Renderer(tokenizer)
            decode, grammars = renderer.decode, Grammars(renderer, model.vocab_size)
        self._engine = EmbeddedEngine(
            model,
            setup.config,
            torch_thread("engine", torch.device(setup.device)),
            shares_weights=shared,
            deterministic=setup.deterministic,
            keeps_weights=setup.keeps_weights,
            decode=decode,
            grammars=grammars,
            ranks=ranks,
        )
        self._receiver = _receiver(setup, weights, model)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Obey messages until one closes the copy, or the other end is gone."""
        loop, inbox = asyncio.get_running_loop(), asyncio.Queue[tuple[Any, ...]]()
        threading.Thread(target=self._read, args=(lambda m: loop.call_soon_threadsafe(inbox.put_nowait, m),), daemon=True).start()
        self._connection.send(("ready", self._engine.capabilities))
        while (message := await inbox.get())[0] != "close":
            self._handle(message)
        await self._engine.close()

    def _read(self, take: Callable[[tuple[Any, ...]], object]) -> None:
        try:
            while True:
                take(self._connection.recv())
        except (EOFError, OSError):
            os._exit(0)  # nobody is there to answer any more, and a step may be under way

    def _handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("tell", method, arguments):
                getattr(self._engine, method)(*arguments)
            case ("call", number, method, arguments):
                made = self._begin(*arguments) if method == "begin" else getattr(self._engine, method)(*arguments)
                task = asyncio.create_task(self._answer(number, made))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case ("generate", number, request):
                task = self._running[number] = asyncio.create_task(self._generate(number, request))
                task.add_done_callback(lambda _: self._running.pop(number))  # also of one that is dropped before it began
            case ("drop", number):
                if (task := self._running.get(number)) is not None:
                    task.cancel()
            case _:
                raise AssertionError(f"an engine's copy was sent {message!r}")

    async def _answer(self, number: int, made: Coroutine[Any, Any, Any]) -> None:
        try:
            self._connection.send((number, await made))
        except Exception as error:  # raised again where it was called
            self._connection.send((number, _portable(error)))

    async def _generate(self, number: int, request: Request) -> None:
        try:
            async for chunk in self._engine.generate(request):
                self._connection.send((number, chunk))
        except Exception as error:  # raised again where the request came from
            self._connection.send((number, _portable(error)))

    async def _begin(self, version: int, ticket: Ticket) -> Receipt:
        """Take over the weights of a ticket."""
        self._receiver.check(ticket, self._engine.held)
        arriving = self._arriving(ticket)
        try:
            return await self._engine.update(Stream(arriving), version)
        finally:
            arriving.close()  # whoever sends need not wait for an engine that reads no further

    def _arriving(self, ticket: Ticket) -> Generator[tuple[str, Tensor]]:
        """Read between two steps, by all ranks at once."""
        self._engine.core.ranks.tell("take", ticket)
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


def _beside(weights: CausalModel, setup: Setup) -> CausalModel:
    """A copy of a model on another device, or this rank's part of it."""
    if setup.links is not None:
        model = attach(setup.model)
        keep_part(model, setup.device)
        return model
    if setup.elsewhere:
        nn.Module.to(weights.hf, torch.device(setup.device))
        return weights
    return copied_to(weights, torch.device(setup.device))


def follow(connection: Connection, setup: Setup, links: Links) -> None:
    """Another rank than the first: do as that one does until it is gone."""
    weights = attach(setup.model)
    follower = links.join(setup.device)
    assert isinstance(follower, Follower)
    sizes = setup.config
    model = _beside(weights, setup)
    core = EngineCore(
        model,
        cache_tokens=sizes.cache_tokens,
        block_size=sizes.block_size,
        max_running=sizes.max_running,
        max_batch_tokens=sizes.max_batch_tokens,
        ranks=follower,
    )
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    try:
        follower.follow(core, _receiver(setup, weights, model))
    except (RuntimeError, EOFError, OSError):  # of an exchange with a rank that is gone; torch's are RuntimeErrors
        traceback.print_exc()
        os._exit(LOST)
    os._exit(0)  # the process group would wait for the others


def _end_with(connection: Connection) -> None:
    """The trainer's process says nothing to it: when it is heard of, it is gone."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os._exit(0)


def _portable(error: Exception) -> Exception:
    cause = "" if error.__cause__ is None else f" ({type(error.__cause__).__name__}: {error.__cause__})"
    if type(error) in KNOWN:
        return type(error)(f"{error}{cause}")
    return EngineFailed(f"{type(error).__name__}: {error}{cause}")


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
        follow(connection, setup, setup.links)
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
