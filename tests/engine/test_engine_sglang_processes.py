"""Broadcasts between processes: servers that make groups with torch's own functions, as SGLang does, and servers that are killed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.engine_setup import DEADLINE_S
from tests.engine.test_engine_sglang import letters
from tests.engine.test_engine_sglang_broadcast import SMALL_BUCKETS, published, trainer_of
from tests.serve.serve_setup import live, model_folder
from tests.serve.test_serve_shutdown import command
from whet.engine.base import EngineFailed, EngineLost
from whet.engine.checksums import check_agreement
from whet.engine.publish import SyncError
from whet.engine.servers.start import ServerAt
from whet.engine.sglang.start import Sglang
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.transport.announcements import Announcer
from whet.transport.base import TransportError
from whet.transport.deliver import deliver
from whet.transport.server_broadcast import ServerBroadcastSender

pytestmark = [pytest.mark.long, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@contextmanager
def sglang_like(folder, *sizes):
    """Servers with so many ranks each, by their addresses."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "tests.engine.sglang_server", str(folder)]
    processes = [subprocess.Popen([*line, str(size)], stdout=subprocess.PIPE, text=True, env=env, cwd=ROOT) for size in sizes]
    try:
        yield [f"http://127.0.0.1:{int(process.stdout.readline())}" for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def told(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, {"Content-Type": "application/json"}), timeout=30) as answer:
        return json.loads(answer.read() or "null")


class Deliveries:
    """Versions to members of their own, without a pool: nothing needs to sample."""

    def __init__(self, folder, urls, timeout_s=20.0):
        self.model = load_causal(folder, ModelConfig(path=str(folder), device="cpu"), trainable=True)
        cut = Naming(without_contents(self.model)).to_files
        self.sender = ServerBroadcastSender("127.0.0.1", timeout_s, SMALL_BUCKETS, "gloo", cut)
        self.urls = dict(enumerate(urls))
        self.members = {i: self.connected(i) for i in self.urls}

    def connected(self, i):
        return ServerAt(Sglang(), f"sglang {i}", self.urls[i], letters, None, 10.0)(threading.Event())

    async def send(self, version):
        with torch.no_grad():
            for weight in self.model.hf.parameters():
                weight.mul_(1.01)
        loads = {f"sglang {i}": lambda ticket, m=member: m.update(ticket, version) for i, member in self.members.items()}
        receivers = [name for member in self.members.values() for name in member.receivers]
        delivery = await deliver(self.sender, self.model.named_weights(), version, loads, receivers)
        return [replace(receipt, engine=receipt.engine) for receipt in delivery.receipts]

    def expected(self):
        return {
            name: hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in self.model.named_weights()
        }

    def close(self):
        self.sender.close()
        for member in self.members.values():
            member.stop()


def run(play):
    return asyncio.run(asyncio.wait_for(play, DEADLINE_S))


def test_processes_that_make_groups_as_sglang_does_receive_every_tensor(folder):
    with sglang_like(folder, 2, 1) as urls:
        deliveries = Deliveries(folder, urls)

        async def play():
            return [await deliveries.send(version) for version in (1, 2)]

        first, second = run(play())
        for url in urls:
            assert all(found == deliveries.expected() for found in told(url, "/state")["ranks"])
            assert told(url, "/model_info") == {"weight_version": "2"}
        check_agreement({receipt.engine: receipt.checksums for receipt in second})
        assert {key.partition(":")[0] for key in second[0].checksums} == {"tp0/2", "tp1/2"}
        before, after = first[0].checksums, second[0].checksums
        assert before.keys() == after.keys() and before.items().isdisjoint(after.items())
        calls = [call for call in told(urls[0], "/calls") if call[0] not in ("calls", "state", "server_info", "model_info")]
        (group,) = [body for path, body in calls if path == "init_weights_update_group"]
        assert (group["rank_offset"], group["world_size"], group["backend"]) == (1, 4, "gloo")
        buckets = [body for path, body in calls if path == "update_weights_from_distributed"]
        assert len(buckets) > 4 and all((body["flush_cache"], body["abort_all_requests"]) == (False, False) for body in buckets)
        assert [name for body in buckets for name in body["names"]] == [name for name, _ in deliveries.model.named_weights()] * 2
        rest = ["begin_weight_update", "update_weights_from_distributed", "end_weight_update", "update_weight_version", "flush_cache"]
        rest += ["weights_checker", "continue_generation"]
        order = [path for i, (path, _) in enumerate(calls) if i == 0 or calls[i - 1][0] != path]
        joined = ["destroy_weights_update_group", "init_weights_update_group"]
        assert order == ["pause_generation", *joined, *rest, "pause_generation", *rest]
        deliveries.close()


def test_a_server_that_refused_a_bucket_is_out_of_its_group_and_session_and_takes_the_next_version(folder):
    """In SGLang a session that is begun twice ends the server: one that failed has to be ended."""
    with sglang_like(folder, 1, 1) as urls:
        deliveries = Deliveries(folder, urls)
        told(urls[1], "/fail", {"fault": "refuse 2"})

        async def play():
            began = time.monotonic()
            with pytest.raises(EngineLost, match=r"sglang 1: version 1 arrived in part, if at all: .*planted"):
                await deliveries.send(1)
            assert time.monotonic() - began < 15
            deliveries.members[1].stop()
            deliveries.members[1] = await asyncio.to_thread(deliveries.connected, 1)
            return await deliveries.send(2)

        assert len(run(play())) == 2
        for url in urls:
            assert told(url, "/state")["ranks"] == [deliveries.expected()] and told(url, "/model_info") == {"weight_version": "2"}
        deliveries.close()


def test_a_server_that_dies_at_a_bucket_is_named_and_the_other_takes_the_next_version(folder):
    with sglang_like(folder, 1, 2) as urls:
        deliveries = Deliveries(folder, urls)
        told(urls[1], "/fail", {"fault": "die 2"})

        async def play():
            began = time.monotonic()
            with pytest.raises((EngineFailed, TransportError), match=r"sglang 1: .*gone"):
                await deliveries.send(1)
            assert time.monotonic() - began < 15
            deliveries.members.pop(1).stop()
            return await deliveries.send(2)

        assert len(run(play())) == 1
        assert told(urls[0], "/state")["ranks"] == [deliveries.expected()]
        deliveries.close()


def test_a_process_that_is_killed_in_the_middle_of_a_broadcast_is_named_in_time(folder, monkeypatch):
    with live(folder) as one, command(folder) as (process, address):
        announce = Announcer.announce

        def killing(announcer, number, tensors):
            if number == 1:
                process.kill()
                process.wait()
            announce(announcer, number, tensors)

        monkeypatch.setattr(Announcer, "announce", killing)
        began = time.monotonic()
        with trainer_of(folder, [one.url, f"http://{address}"]) as trainer, pytest.raises(SyncError, match="sglang 1"):
            published(trainer, 1)
        assert time.monotonic() - began < 30
        assert one.get("/weight_version")[1] == {"weight_version": "default"}, "nothing of it counts"
