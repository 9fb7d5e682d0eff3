"""Faults planted before real vLLM servers: each is found, named, and retried or stopped, and no token is lost (`make test-vllm`)."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.vllm.faulty_proxy import FaultyProxy
from tests.vllm.servers import starter
from tests.vllm.test_vllm import PROMPT, begin, pool_of, publish, run, settings, trained
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Slot
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.weights import WeightSync
from whet.engine.publish import EnginePublisher, SyncError
from whet.engine.servers.pool import direct_names
from whet.engine.servers.start import ServerAt
from whet.engine.vllm.start import Vllm
from whet.model.meta import without_contents
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.folder import FolderWriter
from whet.transport.senders import sender_of
from whet.transport.settings import SyncConfig
from whet.types import Finish, Request, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def urls(folder, decode):
    """Two servers."""
    with ExitStack() as opened, ThreadPoolExecutor(2) as threads:
        starts = [threads.submit(starter(f"vllm {i}", folder, decode), threading.Event()) for i in range(2)]
        found = []
        for start in starts:
            member = start.result()
            opened.callback(member.stop)
            found.append(member._server.url)
        yield found


@pytest.fixture
def proxies(urls):
    """Makes a proxy before each server, with faults of its own."""
    with ExitStack() as opened:

        def make(*each):
            made = [FaultyProxy(url, **given) for url, given in zip(urls, each, strict=True)]
            for proxy in made:
                opened.callback(proxy.close)
            return made

        yield make


def connect(name, url, folder, decode):
    return ServerAt(Vllm(), name, url, decode, direct_names(trained(folder)), 30.0)


def pool_at(proxies, folder, decode, incidents):
    """A pool of servers behind proxies, which are connected to again when they are lost."""
    model = trained(folder)
    bare, config, nobody = without_contents(model), PoolConfig(), threading.Event()
    starts = {f"vllm {i}": connect(f"vllm {i}", proxy.url, folder, decode) for i, proxy in enumerate(proxies)}
    slots = [Slot(name, start, start(nobody), breaker_of(config)) for name, start in starts.items()]
    sender = sender_of(SyncConfig(transport="disk"), bare, Path(mkdtemp(prefix="whet-vllm-")), "127.0.0.1")
    weights = WeightSync(sender, dict(bare.named_weights()))
    return EnginePool(slots, weights, config, deterministic=False, on_incident=incidents.append, tolerance=1e-3)


def rows_of(run_dir):
    """Metrics of each step, in which every token is accounted for."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in found if "reward/total" in row]
    for row in steps:
        sampled = row["tokens/sampled"] + row["tokens/carried"]
        assert sampled == row["tokens/trained"] + row["tokens/dropped"] + row["tokens/held"] and row["tokens/unaccounted"] == 0, row
        assert row["mismatch/logprob_mean"] < 1e-3
    return steps


def told(table, tmp_path):
    process = begin(table, tmp_path)
    out, _ = process.communicate(timeout=300)
    return process.returncode, out


def behind(proxies, folder, run_dir, steps):
    table = settings(folder, run_dir, steps)
    table["engine"] = {"name": "vllm", "urls": [proxy.url for proxy in proxies]}
    (run_dir.parent / "run.json").write_text(json.dumps(table))
    return table


def test_a_run_behind_servers_with_every_fault_of_a_reply_loses_no_token(proxies, folder, tmp_path):
    faults = {5: "500", 6: "500", 12: "fewer", 20: "cut", 30: "slow", 31: "slow"}
    one, other = proxies({"faults": faults}, {"refused": {("/update_weights", 3): 500}})
    status, out = told(behind([one, other], folder, tmp_path / "run", 6), tmp_path)
    assert status == 0, out[-4000:]
    assert one.planted == list(faults.values()) and other.planted == ["/update_weights 500"]
    steps = rows_of(tmp_path / "run")
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    assert sum(row["engine/retried_requests"] for row in steps) >= 4 and sum(row["engine/restarts"] for row in steps) >= 2
    for words in ("HTTP 500: planted", "1 tokens came with 0 log-probs", "generate is gone", "arrived in part"):
        assert words in out, words


def test_a_run_stops_at_another_version_and_the_same_command_goes_on(proxies, folder, tmp_path):
    one, other = proxies({"faults": {30: "version"}}, {})
    table = behind([one, other], folder, tmp_path / "run", 3)
    status, out = told(table, tmp_path)
    assert status != 0 and "somebody else changes its weights" in out and "saved after" in out, out[-4000:]
    status, out = told(table, tmp_path)
    assert status == 0, out[-4000:]
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3]


def test_an_update_that_fails_on_one_of_two_servers_leaves_no_stale_weights(proxies, folder, decode):
    """The second server keeps its old weights and answers 500; it serves again once it holds the new ones, proven."""
    incidents = []
    one, other = proxies({}, {"refused": {("/update_weights", 1): 500}})
    pool = pool_at([one, other], folder, decode, incidents)
    model = trained(folder, seed=11)

    async def play():
        with ThreadPoolExecutor(1) as thread:
            publication = await EnginePublisher(TorchBackend(model, TrainConfig(), None), model, pool, thread).publish(1)
        while len(pool.members) < 2 or any(not slot.up for slot in pool.slots):
            await asyncio.sleep(0.05)
        replies = []
        for i, member in enumerate(pool.members):
            chunks = [chunk async for chunk in member.generate(Request(f"after {i}", PROMPT, SamplingParams(20, seed=1)))]
            replies.append(chunks)
        return publication, replies

    publication, replies = run(play())
    assert [receipt.engine for receipt in publication.receipt.members] == ["vllm 0"]
    assert [incident.name for incident in incidents] == ["vllm 1"] and "version 1 arrived in part" in incidents[0].cause
    for chunks in replies:
        tokens = [token for chunk in chunks for token in chunk.tokens]
        found = [each for chunk in chunks for each in chunk.logprobs]
        assert {chunk.version for chunk in chunks} == {1}
        assert found == pytest.approx(logprobs_of(folder, model, tokens), abs=1e-4), "those of the new weights"
    pool.end()


def logprobs_of(folder, model, tokens):
    """Log-probs of a reply to the prompt, by transformers with the trainer's weights."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    missing = plain.load_state_dict({name: weight.detach() for name, weight in model.named_weights()}, strict=False)
    assert not missing.unexpected_keys
    row = torch.tensor([*PROMPT, *tokens])
    with torch.no_grad():
        logits = plain(row[None]).logits[0].double()
    return torch.log_softmax(logits, -1)[torch.arange(len(row) - 1), row[1:]][len(PROMPT) - 1 :].tolist()


def test_swapped_tensors_of_one_shape_are_named(urls, folder, decode, monkeypatch):
    names = ("model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight")
    swap = dict(zip(names, reversed(names), strict=True))
    plain = FolderWriter.write
    monkeypatch.setattr(
        FolderWriter, "write", lambda self, where, weights: plain(self, where, ((swap.get(name, name), each) for name, each in weights))
    )
    member = connect("vllm 0", urls[0], folder, decode)(threading.Event())
    model = trained(folder, seed=12)
    with pytest.raises(SyncError, match=f"{names[0]} and {names[1]} are swapped"):
        publish(pool_of(member, model, "disk"), model, 2)


def test_an_update_in_the_middle_of_streamed_replies_costs_no_token(urls, folder, decode):
    model = trained(folder)
    member = connect("vllm 1", urls[1], folder, decode)(threading.Event())
    pool = pool_of(member, model, "disk")
    publish(pool, model, 5)

    async def play(new, version):
        replies = [[] for _ in range(64)]

        async def read(i, chunks):
            async for chunk in pool.generate(Request(f"r{version} {i}", PROMPT, SamplingParams(480, seed=i), chunk_tokens=8)):
                chunks.append(chunk)

        reading = [asyncio.ensure_future(read(i, chunks)) for i, chunks in enumerate(replies)]
        while not any(replies):
            await asyncio.sleep(0.005)
        await pool.update(new.named_weights(), version)
        await asyncio.gather(*reading)
        return replies

    crossed, old = [], model
    for version in range(6, 11):  # on a busy machine the replies may end before the update comes
        new = trained(folder, seed=version)
        for chunks in run(play(new, version)):
            tokens = [token for chunk in chunks for token in chunk.tokens]
            versions = [chunk.version for chunk in chunks for _ in chunk.tokens]
            assert len(tokens) == 480 and chunks[-1].finish is Finish.LENGTH and versions == sorted(versions)
            if set(versions) == {version - 1, version}:
                crossed.append((tokens, versions, [each for chunk in chunks for each in chunk.logprobs]))
        if crossed:
            break
        old = new
    assert crossed, "a reply was in the middle"
    for tokens, versions, logprobs in crossed[:3]:
        by = {version - 1: logprobs_of(folder, old, tokens), version: logprobs_of(folder, new, tokens)}
        assert logprobs == pytest.approx([by[each][place] for place, each in enumerate(versions)], abs=1e-4)
