"""Calls over a connection: several at once, errors with the traceback of the other process, and no call without an answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from typing import Protocol

import pytest

from whet.calls.methods import Target
from whet.calls.pipe import Caller, CallServer


class Counting(Protocol):
    def note(self, text: str) -> None: ...
    def count(self, until: int) -> AsyncGenerator[int, None]: ...
    async def twice(self, number: int) -> int: ...
    async def noted(self) -> list[str]: ...


class Counter:
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    async def count(self, until):
        try:
            for number in range(until):
                await asyncio.sleep(0.001)
                yield number
        finally:
            self.notes.append(f"counted to {until}")

    async def twice(self, number):
        await asyncio.sleep(0.01 / number)
        if number == 13:
            raise ValueError("unlucky") from KeyError("why")
        return 2 * number

    async def noted(self):
        return self.notes


class Gone(Exception):
    pass


@pytest.fixture
def caller():
    pair = socket.socketpair()
    link = pair[0].dup()
    ends = [Connection(end.detach()) for end in pair]
    gone = threading.Event()
    server = CallServer(ends[1], {"counter": Target(Counter(), Counting)}, gone.set)
    serving = threading.Thread(target=lambda: asyncio.run(server.serve()))
    serving.start()
    made = Caller(ends[0], "caller", Gone, lambda failure: RuntimeError(f"{failure.kind}: {failure.message}{failure.cause}"))

    def ended():
        made.cause = made.cause or "it ended"

    made.listen(ended)
    yield made
    made.post(None)
    serving.join(20.0)
    assert not serving.is_alive()
    with link:
        link.shutdown(socket.SHUT_RDWR)
    assert gone.wait(20.0)


def test_several_calls_run_at_once_and_get_their_own_answers(caller):
    async def main():
        found = await asyncio.gather(*(caller.call("counter", "twice", number) for number in range(1, 10)))
        assert found == [2 * number for number in range(1, 10)]
        assert [number async for number in caller.stream("counter", "count", 5)] == list(range(5))

    asyncio.run(asyncio.wait_for(main(), 20))


def test_an_error_has_the_traceback_of_the_other_process(caller):
    with pytest.raises(RuntimeError, match=r"^ValueError: unlucky \(KeyError: 'why'\)") as raised:
        asyncio.run(asyncio.wait_for(caller.call("counter", "twice", 13), 20))
    assert "in twice" in raised.value.__notes__[0] and "ValueError: unlucky" in raised.value.__notes__[0]


def test_a_stream_that_is_closed_early_ends_over_there(caller):
    async def main():
        caller.notify("counter", "note", "first")
        counting = caller.stream("counter", "count", 10**6)
        assert await anext(counting) == 0
        await counting.aclose()
        while (notes := await caller.call("counter", "noted"))[1:] != [f"counted to {10**6}"]:
            assert notes == ["first"]

    asyncio.run(asyncio.wait_for(main(), 20))


def test_waiting_and_later_calls_raise_the_cause(caller):
    async def main():
        waiting = asyncio.create_task(anext(caller.stream("counter", "count", 0)))
        with pytest.raises(StopAsyncIteration):
            await waiting
        asked = asyncio.create_task(caller.call("counter", "twice", 0.001))
        await asyncio.sleep(0)
        caller.cause = "it was ended"
        caller.wake()
        with pytest.raises(Gone, match="it was ended"):
            await asked
        with pytest.raises(Gone, match="it was ended"):
            await caller.call("counter", "twice", 1)

    asyncio.run(asyncio.wait_for(main(), 20))
