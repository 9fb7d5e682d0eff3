"""A copy as the trainer's process sees it: what is sent to one that reads nothing holds nobody up."""

import asyncio
import socket
import threading
from multiprocessing.connection import Connection

import pytest
import torch

from whet.engine.base import Capabilities, EngineLost
from whet.engine.pool.supervisor import in_time
from whet.engine.workers.launch import ExitStatus, Link
from whet.engine.workers.processes import CopyProcess
from whet.engine.workers.setup import Setup
from whet.model.causal import use_device
from whet.types import Request, SamplingParams


class Silent:
    """A process that says that it is ready, and reads nothing."""

    def __init__(self):
        mine, self._theirs = socket.socketpair()
        self.link = Link(Connection(mine.detach()), self)
        self._connection = Connection(self._theirs.detach())
        self._connection.send(Capabilities(4096, False, False))
        self._killing = threading.Lock()

    def start(self, name, setup, pipes=(), *, given_up):
        return self.link

    def kill(self):
        with self._killing:  # whoever reads it kills it, too
            if not self._connection.closed:
                self._connection.close()

    def ended(self, timeout_s):
        return ExitStatus(-9) if self._connection.closed else None

    def stacks(self, *, lost):
        return ""

    def last_lines(self):
        return []


SETUP = Setup(None, None, "cpu", False, 1, None)


def test_requests_to_a_copy_that_reads_nothing_hold_nobody_up(tmp_path):
    process = Silent()
    copy = CopyProcess("engine copy 0", SETUP, ["cpu"], tmp_path / "store", process, threading.Event())
    copy.ready(threading.Event(), 5.0)

    async def main():
        async def one(number):
            async for _ in copy.generate(Request(f"r{number}", tuple(range(2000, 4000)), SamplingParams(10))):
                raise AssertionError("nobody answers")

        asked = [asyncio.create_task(one(number)) for number in range(200)]
        with pytest.raises(EngineLost, match="a look at its health"):
            await in_time(copy.health(), "a look at its health", 0.3)
        await asyncio.to_thread(copy.kill)
        found = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 10)
        assert {type(error) for error in found} == {EngineLost}

    asyncio.run(asyncio.wait_for(main(), 30))
    with pytest.raises(EngineLost, match="engine copy 0 was killed"):
        copy.open("late")


def test_a_worker_on_a_gpu_has_it_as_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("cpu", "cuda:1", "cuda"):
        use_device(torch.device(name))
    assert chosen == [torch.device("cuda:1")]
