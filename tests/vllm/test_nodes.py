"""A vLLM server of two processes that meet as those of two nodes do, on this machine: replies, new weights, and the loss of one node."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.vllm.servers import ARGS, START_S, python
from tests.vllm.test_vllm import PROMPT, chunks_of, pool_of, publish, run, trained
from whet.engine.base import EngineLost
from whet.engine.servers.hosts import LOOPBACK, LocalHost
from whet.engine.servers.pool import direct_names
from whet.engine.servers.start import ServerStarter
from whet.engine.vllm.start import Vllm
from whet.types import Request, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_server_on_two_nodes_answers_takes_weights_and_is_lost_with_one_of_them(folder, decode):
    processes = {}

    class Node(LocalHost):
        def start(self, name, command, environment):
            processes[name] = process = super().start(name, command, environment)
            assert environment["VLLM_HOST_IP"] == LOOPBACK
            return process

    names, args = direct_names(trained(folder)), ARGS | {"tensor_parallel_size": 2, "nnodes": 2}
    start = ServerStarter(
        Vllm(), "vllm 0", python(), folder, "float32", args, decode, names, START_S, lambda name, given_up: Node(), num_nodes=2
    )
    member = start(threading.Event())
    try:
        assert list(processes) == ["vllm 0", "vllm 0 node 1"]
        model = trained(folder, seed=3)
        for version, transport in enumerate(("disk", "broadcast"), 1):
            publication = publish(pool_of(member, model, transport), model, version)
            (receipt,) = publication.receipt.members
            assert receipt.wire is not None and set(receipt.wire) == {name for name, _ in model.named_weights()}
            assert publication.proof.probe_nats < 1e-4 and len(member.receivers) == 2

        async def play(number):
            return await chunks_of(member, Request(f"r{number}", PROMPT, SamplingParams(20, seed=number)))

        assert {chunk.version for chunk in run(play(1))} == {2}
        processes["vllm 0 node 1"]._child.kill()
        deadline = time.monotonic() + 60
        while processes["vllm 0"].ended is None:
            assert time.monotonic() < deadline, "the first node outlives the second"
            time.sleep(0.2)
        with pytest.raises(EngineLost):
            run(asyncio.wait_for(play(2), 60))
    finally:
        member.stop()
    assert all(process.ended is not None for process in processes.values())
