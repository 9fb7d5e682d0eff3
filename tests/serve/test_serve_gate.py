"""Admission in the order of arrival, within its bounds."""

import asyncio

import pytest

from whet.serve.errors import ApiError
from whet.serve.gate import Admission, Gate


def test_nobody_overtakes_and_nothing_is_lost():
    async def play():
        gate, order = Gate(4, 100), []

        async def one(name, size):
            ticket = Admission(size)
            assert await gate.enter(ticket)
            assert gate.num_running <= 4
            order.append(name)
            for _ in range(3):
                await asyncio.sleep(0)
            gate.leave(ticket)

        await asyncio.gather(*(one(i, size) for i, size in enumerate([3, 2, 1, 4, 1, 1, 2])))
        assert order == list(range(7))
        assert gate.num_running == gate.num_waiting == 0

    asyncio.run(play())


def test_one_that_is_cancelled_or_gives_up_makes_room():
    async def play():
        gate = Gate(1, 10)
        first = Admission(1)
        await gate.enter(first)
        tickets = [Admission(1) for _ in range(3)]
        waiting = [asyncio.ensure_future(gate.enter(ticket)) for ticket in tickets]
        await asyncio.sleep(0)
        waiting[0].cancel()
        gate.give_up(tickets[1])
        await asyncio.sleep(0)
        assert gate.num_waiting == 1 and waiting[1].result() is False
        gate.leave(first)
        assert await waiting[2]
        gate.leave(tickets[2])
        assert gate.num_running == 0

    asyncio.run(play())


def test_one_that_is_cancelled_in_the_moment_of_its_turn_gives_it_back():
    async def play():
        gate = Gate(1, 10)
        first, second, third = Admission(1), Admission(1), Admission(1)
        await gate.enter(first)
        waiting = asyncio.ensure_future(gate.enter(second))
        await asyncio.sleep(0)
        gate.leave(first)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled() and gate.num_running == 0
        assert await gate.enter(third)

    asyncio.run(play())


def test_its_bounds():
    async def play():
        gate = Gate(2, 2)
        await gate.enter(Admission(1))
        waiting = asyncio.ensure_future(gate.enter(Admission(2)))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as full:
            await gate.enter(Admission(1))
        assert full.value.status == 429
        with pytest.raises(ApiError) as never:
            await gate.enter(Admission(3))
        assert never.value.status == 400
        waiting.cancel()

    asyncio.run(play())
