"""Weights by a broadcast through SGLang's routes: against `whet serve`, over gloo, with faults planted in its servers."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.engine_setup import DEADLINE_S
from tests.engine.test_engine_sglang import ask, letters, mixture
from tests.serve.serve_setup import SHAPE, live, model_folder
from whet.engine.base import SCORE_TOLERANCE, EngineFailed
from whet.engine.checksums import ChecksumHistory, check_agreement, files_of
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Slot
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.proof import _differences
from whet.engine.pool.weights import WeightSync
from whet.engine.publish import EnginePublisher, SyncError
from whet.engine.servers.behind_router import ServersBehindRouter
from whet.engine.servers.hosts import LOOPBACK, local_host
from whet.engine.servers.pool import ServerSites, check_devices
from whet.engine.servers.start import ServerAt
from whet.engine.sglang.broadcast import bucket_body, check_success, group_body, version_body
from whet.engine.sglang.checksums import checksums_of
from whet.engine.sglang.start import Sglang, no_broadcast
from whet.model.causal import load_causal
from whet.model.config import ModelConfig
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.serve.access import Keys
from whet.serve.broadcast import Broadcasts
from whet.serve.control import WeightsRefused
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.announcements import BucketLayout
from whet.transport.base import ServerBroadcastTicket
from whet.transport.server_broadcast import ServerBroadcastSender
from whet.types import Receipt

__all__ = ["mixture"]
SMALL_BUCKETS = 2 * 16 * 1024
"""Size of two buckets: the tiny model needs several."""
PROMPT = tuple(range(3, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def servers(folder):
    with live(folder) as one, live(folder) as other:
        yield one, other


class Trainer:
    """A model that publishes to servers by a broadcast."""

    def __init__(self, folder, urls, thread, *, timeout_s=20.0, restarts=0, starts=None):
        self.model = load_causal(folder, ModelConfig(path=str(folder), device="cpu"), trainable=True)
        bare, config = without_contents(self.model), PoolConfig(restarts=restarts)
        self.sender = ServerBroadcastSender("127.0.0.1", timeout_s, SMALL_BUCKETS, "gloo", Naming(bare).to_files)
        starts = starts or {f"sglang {i}": ServerAt(Sglang(), f"sglang {i}", url, letters, None, 10.0) for i, url in enumerate(urls)}
        slots = [Slot(name, start, start(threading.Event()), breaker_of(config)) for name, start in starts.items()]
        sync, tolerance = WeightSync(self.sender, dict(bare.named_weights())), SCORE_TOLERANCE[torch.float32]
        self.incidents = []
        self.pool = EnginePool(slots, sync, config, deterministic=False, on_incident=self.incidents.append, tolerance=tolerance)
        self.publisher = EnginePublisher(TorchBackend(self.model, TrainConfig(), None), self.model, self.pool, thread)

    def change(self):
        with torch.no_grad():
            for weight in self.model.hf.parameters():
                weight.mul_(1.01)

    async def publish(self, version):
        self.change()
        return await self.publisher.publish(version)


@contextmanager
def trainer_of(folder, urls=(), **options):
    with ThreadPoolExecutor(1) as thread:
        trainer = Trainer(folder, urls, thread, **options)
        try:
            yield trainer
        finally:
            trainer.pool.end()


def run(play):
    return asyncio.run(asyncio.wait_for(play, DEADLINE_S))


def published(trainer, *versions):
    async def play():
        try:
            return [await trainer.publish(version) for version in versions]
        finally:
            await trainer.pool.close()

    return run(play())


def plain(folder, trainer=None):
    """The model of transformers, with a trainer's weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if trainer is not None:
        model.load_state_dict(dict(trainer.model.hf.state_dict()))
    return model


def logprobs_of(model, tokens):
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([list(tokens)])).logits[0].float(), -1)
    return [float(table[place, token]) for place, token in enumerate(list(tokens)[1:])]


def calls_of(server):
    """Names of the service's methods for broadcasts, as they are called from now on."""
    calls, owner = [], server.service.broadcasts
    for name in ("join", "leave", "begin", "receive", "end"):
        method = getattr(owner, name)

        async def noted(*args, name=name, method=method):
            calls.append(name)
            return await method(*args)

        setattr(owner, name, noted)
    return calls


# What it does.


def test_servers_hold_what_was_broadcast_and_score_as_transformers_does(folder, servers):
    calls = calls_of(servers[0])
    with trainer_of(folder, [server.url for server in servers]) as trainer:
        found = published(trainer, 1, 2)
        expected = logprobs_of(plain(folder, trainer), PROMPT)
    for server in servers:
        answer = server.generate(input_ids=list(PROMPT), sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
        scored = [each[0] for each in answer["meta_info"]["input_token_logprobs"][1:]]
        assert scored == pytest.approx(expected, abs=1e-4) and answer["meta_info"]["weight_version"] == "2"
    assert logprobs_of(plain(folder), PROMPT) != pytest.approx(expected, abs=1e-3), "the weights have changed"
    num_buckets = calls.count("receive") // 2
    one = ["begin", *["receive"] * num_buckets, "end"]
    assert num_buckets > 2 and calls == ["leave", "join", *one, *one], "one group serves many versions"
    for publication in found:
        first, second = publication.receipt.members
        assert publication.proof.probe_nats < 1e-4 and publication.proof.memory_share == 0.0, "agreement is no comparison with the trainer"
        assert first.checksums == second.checksums and len(first.checksums) > 20 and first.dtype == "float32"
    sizes = {name: weight.nbytes for name, weight in trainer.model.named_weights()}
    assert found[0].receipt.wire_bytes == sum(sizes.values())


def test_replies_keep_their_tokens_and_go_on_under_the_new_weights(folder, servers):
    async def read(pool, i, begun):
        chunks = []
        async for chunk in pool.generate(ask(f"r{i}", num=300, chunk=1)):
            chunks.append(chunk)
            begun[i].set()
        return chunks

    with trainer_of(folder, [server.url for server in servers]) as trainer:

        async def play():
            begun = [asyncio.Event() for _ in range(6)]
            replies = [asyncio.ensure_future(read(trainer.pool, i, begun)) for i in range(6)]
            for each in begun:
                await each.wait()
            await trainer.publish(1)
            done = await asyncio.gather(*replies)
            await trainer.pool.close()
            return done

        replies = run(play())
        after = plain(folder, trainer)
    for chunks in replies:
        tokens = [token for chunk in chunks for token in chunk.tokens]
        versions = [chunk.version for chunk in chunks for _ in chunk.tokens]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        assert len(tokens) == 300 and set(versions) == {0, 1} and versions == sorted(versions)
        changed = versions.index(1)
        old, new = (logprobs_of(model, (*ask().tokens, *tokens))[len(ask().tokens) - 1 :] for model in (plain(folder), after))
        assert logprobs[:changed] == pytest.approx(old[:changed], abs=1e-4)
        assert logprobs[changed:] == pytest.approx(new[changed:], abs=1e-4)


def test_a_server_that_joins_means_a_new_group_and_waits_for_the_next_version(folder, servers):
    one, other = servers
    calls = calls_of(one)
    with trainer_of(folder, [one.url]) as trainer:

        async def play():
            await trainer.publish(1)
            await trainer.pool.join("late", ServerAt(Sglang(), "late", other.url, letters, None, 10.0))
            states = {slot.name: str(slot.state) for slot in trainer.pool.slots}
            publication = await trainer.publish(2)
            up = [slot.name for slot in trainer.pool.slots if slot.up]
            await trainer.pool.close()
            return states, publication, up

        states, publication, up = run(play())
    assert states == {"sglang 0": "serving", "late": "behind"} and up == ["sglang 0", "late"]
    assert [receipt.engine for receipt in publication.receipt.members] == up
    assert calls.count("join") == 2 and [other.get("/weight_version")[1] for other in servers] == [{"weight_version": "2"}] * 2


def test_servers_that_an_earlier_run_left_in_a_group_take_part_in_another(folder, servers):
    for version in (1, 2):
        with trainer_of(folder, [server.url for server in servers]) as trainer:
            published(trainer, version)
    assert servers[0].get("/weight_version")[1] == {"weight_version": "2"}


def test_a_server_of_several_processes_has_several_ranks(folder):
    """As a server with tensor parallelism has them; here both ranks are in one process."""
    with live(folder, engine={"embedded": {"cache_tokens": 8192, "block_size": 4}}) as one, live(folder) as other:
        one.service.broadcasts._num_ranks = 2
        one.service.config.engine.embedded.__dict__["tensor_parallel"] = 2
        joined = []
        join = one.service.broadcasts.join

        async def noted(body):
            joined.append(body)
            await join(body)

        one.service.broadcasts.join = noted
        with trainer_of(folder, [other.url, one.url]) as trainer:
            (publication,) = published(trainer, 1)
        assert (joined[0].rank_offset, joined[0].world_size) == (2, 4) and publication.proof.probe_nats < 1e-4


def test_servers_behind_a_router_take_a_broadcast_each(folder, servers):
    urls = {f"sglang {i}": server.url for i, server in enumerate(servers)}
    start = ServersBehindRouter(Sglang(), "sglang router", servers[0].url, urls, letters, None, 1e-3, 10.0)
    with trainer_of(folder, starts={"sglang router": start}) as trainer:
        (publication,) = published(trainer, 1)
    assert publication.proof.probe_nats < 1e-4 and len(publication.receipt.checksums) > 20
    assert [server.get("/weight_version")[1] for server in servers] == [{"weight_version": "1"}] * 2


def test_experts_have_the_names_that_files_have(mixture):
    folder, _ = mixture
    with live(folder) as server, trainer_of(folder, [server.url]) as trainer:
        (publication,) = published(trainer, 1)
        names = server.service.broadcasts._files.shapes
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in names and publication.proof.probe_nats < 1e-3


# What can go wrong.


def failing_at(server, number, failure):
    """Have a server fail at a bucket of the next updates."""
    receive, count = server.service.broadcasts.receive, 0

    async def received(body):
        nonlocal count
        count += 1
        if count == number:
            await failure(body)
        await receive(body)

    server.service.broadcasts.receive = received


async def refuse(body):
    raise WeightsRefused("planted")


@pytest.mark.parametrize("number", [1, 2])
def test_a_server_that_fails_at_a_bucket_is_named_and_the_others_do_not_wait(folder, servers, number):
    failing_at(servers[1], number, refuse)
    began = time.monotonic()
    with trainer_of(folder, [server.url for server in servers]) as trainer:
        with pytest.raises(SyncError, match=r"sglang 1: version 1 arrived in part, if at all: .*planted"):
            published(trainer, 1)
        (lost, together) = trainer.incidents
    assert time.monotonic() - began < 15
    assert lost.name == "sglang 1" and "planted" in lost.cause and "the engines may hold half of version 1" in together.cause
    for server in servers:
        assert server.get("/weight_version")[1] == {"weight_version": "default"}


def test_servers_that_live_take_the_next_version_and_the_lost_one_comes_back(folder, servers):
    failing_at(servers[1], 2, refuse)
    with trainer_of(folder, [server.url for server in servers], restarts=3) as trainer:

        async def play():
            with suppress(SyncError):
                await trainer.publish(1)
            with pytest.raises(EngineFailed, match="half of version 1"):
                await trainer.pool.score(PROMPT)
            while any(slot.member is None for slot in trainer.pool.slots):
                await asyncio.sleep(0.01)
            publication = await trainer.publish(2)
            await trainer.pool.close()
            return publication

        publication = run(play())
    assert len(publication.receipt.members) == 2 and publication.proof.probe_nats < 1e-4
    assert [server.get("/weight_version")[1] for server in servers] == [{"weight_version": "2"}] * 2


def test_a_server_that_answers_no_bucket_is_given_up_in_time(folder, servers):
    held = threading.Event()

    async def hold(body):
        await asyncio.to_thread(held.wait, 30)

    failing_at(servers[1], 2, hold)
    began = time.monotonic()
    try:
        urls = [server.url for server in servers]
        with trainer_of(folder, urls, timeout_s=1.0) as trainer, pytest.raises(SyncError, match="sglang 1"):
            published(trainer, 1)
    finally:
        held.set()
    assert time.monotonic() - began < 20


def test_a_tensor_of_another_shape_is_named_and_changes_nothing(folder, servers, tmp_path):
    wide = model_folder(tmp_path / "wide", shape=SHAPE.model_copy(update={"intermediate_size": 64}))
    with live(wide) as other, trainer_of(folder, [servers[0].url, other.url]) as trainer:
        with pytest.raises(SyncError, match=r"mlp\.\w+_proj\.weight has the shape \(\d+, \d+\), not the model's \(\d+, \d+\)"):
            published(trainer, 1)
        assert other.get("/weight_version")[1] == {"weight_version": "default"}
        answer = other.generate(input_ids=list(PROMPT), sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=0)
        scored = [each[0] for each in answer["meta_info"]["input_token_logprobs"][1:]]
        assert scored == pytest.approx(logprobs_of(plain(wide), PROMPT), abs=1e-4)


def test_a_server_whose_checksum_differs_is_named_with_the_tensor(folder, servers):
    digests = servers[1].service.digests

    async def changed():
        return await digests() | {"model.norm.weight": "0123456789abcdef"}

    servers[1].service.digests = changed
    words = r"sglang 1 and sglang 0 hold other weights than each other.*model\.norm\.weight$"
    with trainer_of(folder, [server.url for server in servers]) as trainer, pytest.raises(SyncError, match=words):
        published(trainer, 1)


def test_weights_that_do_not_change_in_memory_are_found(folder, servers):
    """All servers alike hold a tensor back: they agree with each other, and not with what was sent."""
    for server in servers:
        kept = {}

        async def held_back(digests=server.service.digests, kept=kept):
            found = await digests()
            kept.setdefault("model.norm.weight", found["model.norm.weight"])
            return found | kept

        server.service.digests = held_back
    with trainer_of(folder, [server.url for server in servers]) as trainer:
        words = r"sglang 0 holds weights as they were before.*: model\.norm\.weight$"
        with pytest.raises(SyncError, match=words):
            published(trainer, 1, 2)


def test_a_server_without_checksums_is_named_once_and_proven_by_the_probe(folder, servers):
    for server in servers:
        server.service.digests = None
    with trainer_of(folder, [servers[0].url]) as trainer, pytest.warns(UserWarning, match="/weights_checker") as warned:
        found = published(trainer, 1, 2)
    assert len([each for each in warned if "/weights_checker" in str(each.message)]) == 1
    assert [publication.receipt.members[0].checksums for publication in found] == [None, None]


def test_the_routes_of_broadcasts_want_the_key_of_control(folder):
    paths = ("/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update", "/update_weights_from_distributed")
    with live(folder, Keys("open" * 4, "control" * 4)) as server:
        for path in (*paths, "/end_weight_update", "/update_weight_version", "/weights_checker"):
            assert server.send(path, {}, Authorization=f"Bearer {'open' * 4}")[0] == 401
            assert server.send(path, {}, Authorization=f"Bearer {'control' * 4}")[0] != 401


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, "no update is open"),
        ("/end_weight_update", {}, "no update is open"),
        ("/destroy_weights_update_group", {"group_name": "a"}, "does not exist"),
        ("/init_weights_update_group", {"backend": "nccl"}, "gloo alone"),
        ("/init_weights_update_group", {"backend": "gloo", "rank_offset": 2}, "leaves no room"),
    ],
)
def test_a_call_out_of_order_says_so_and_changes_nothing(servers, path, body, words):
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    status, answer = servers[0].send(path, (group | body) if "init" in path else body)
    assert status == 400 and answer["success"] is False and words in answer["message"]


def test_tensors_that_are_missing_or_unknown_are_refused(folder, servers):
    server = servers[0]
    assert server.send("/begin_weight_update", {})[1]["success"] is True
    status, answer = server.send("/end_weight_update", {})
    assert status == 400 and "tensors are missing, the first model.embed_tokens.weight" in answer["message"]
    server.send("/begin_weight_update", {})
    server.service.broadcasts._groups["g"] = []
    for name, dtype, shape, words in [("a", "float32", [1], "no tensor 'a'"), ("model.norm.weight", "int8", [32], "is not one of")]:
        status, answer = server.send(
            "/update_weights_from_distributed", {"names": [name], "dtypes": [dtype], "shapes": [shape], "group_name": "g"}
        )
        assert status == 400 and words in answer["message"]
    often = {"names": ["model.norm.weight"] * 9, "dtypes": ["float64"] * 9, "shapes": [[32]] * 9, "group_name": "g"}
    status, answer = server.send("/update_weights_from_distributed", often)
    assert status == 400 and "a bucket has each name once" in answer["message"], "memory is taken for one model at most"


def test_looking_at_a_whole_model_holds_up_no_other_request(monkeypatch):
    async def ended():
        broadcasts, seen, isfinite = Broadcasts(SimpleNamespace(shapes={"a": torch.Size([2])}), 1), [], torch.isfinite
        monkeypatch.setattr(torch, "isfinite", lambda tensor: seen.append(threading.current_thread()) or isfinite(tensor))
        for value in (1.0, float("nan")):
            await broadcasts.begin()
            broadcasts._update.tensors["a"] = torch.tensor([0.0, value])
            if value == value:
                assert (await broadcasts.end()).tensors.keys() == {"a"}
            else:
                with pytest.raises(WeightsRefused, match="1 tensors have numbers that are not finite, the first a"):
                    await broadcasts.end()
        return seen

    assert threading.current_thread() not in asyncio.run(ended())


# SGLang's shapes.


def test_the_bodies_are_sglangs_and_abort_nothing():
    ticket = ServerBroadcastTicket(3, "10.0.0.1", 5, 1, ("a rank 0", "b rank 0", "b rank 1"), "nccl", 1.0)
    assert group_body(ticket, 29500, ["b rank 0", "b rank 1"]) == {
        "master_address": "10.0.0.1",
        "master_port": 29500,
        "rank_offset": 2,
        "world_size": 4,
        "group_name": "whet",
        "backend": "nccl",
    }
    assert bucket_body(BucketLayout.of([("w", torch.zeros(2, 3, dtype=torch.bfloat16)), ("b", torch.zeros(()))])) == {
        "names": ["w", "b"],
        "dtypes": ["bfloat16", "float32"],
        "shapes": [[2, 3], []],
        "group_name": "whet",
        "flush_cache": False,
        "abort_all_requests": False,
    }
    assert version_body(7) == {"new_version": "7", "abort_all_requests": False}, "SGLang aborts all by itself"


@pytest.mark.parametrize("answer", [{"success": False, "message": "partially updated"}, {"message": "partially updated"}, None, "ok"])
def test_a_failure_in_an_answer_of_status_200_is_one(answer):
    with pytest.raises(EngineFailed, match="sglang 0: /x: "):
        check_success("sglang 0", "/x", answer)
    check_success("sglang 0", "/x", {"success": True, "message": ""})


def rank(tp, size, checksums, *, several=True):
    others = {"pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1, "rank": tp, "size": size}
    info = {"role": "target", "tp_rank": tp, "tp_size": size, **others}
    return {"checksums": checksums, "per_gpu_checksum": "ab", "parallelism_info": [info] if several else info}


@pytest.mark.parametrize("several", [True, False])
def test_checksums_have_their_processes_places(several):
    ranks = [rank(0, 2, {"w": "0" * 16}, several=several), rank(1, 2, {"w": "1" * 16}, several=several)]
    found = checksums_of("a", {"success": True, "message": "Success.", "ranks": ranks})
    assert found == {"tp0/2:pp0/1:dp0/1:w": "0" * 16, "tp1/2:pp0/1:dp0/1:w": "1" * 16}
    for answer in ({"success": True, "message": ""}, {"success": True, "ranks": []}, {"success": True, "ranks": [{}]}):
        with pytest.raises(EngineFailed, match="a: /weights_checker answered without checksums"):
            checksums_of("a", answer)
    with pytest.raises(EngineFailed, match="a: /weights_checker: no such action"):
        checksums_of("a", {"success": False, "message": "no such action"})


def test_servers_of_other_layouts_are_not_compared():
    one, two = {"tp0/1:pp0/1:dp0/1:w": "a"}, {"tp0/2:pp0/1:dp0/1:w": "b", "tp1/2:pp0/1:dp0/1:w": "c"}
    check_agreement({"a": one, "b": two, "c": dict(one)})
    with pytest.raises(EngineFailed, match=r"c and b hold other weights than each other.*tp1/2:pp0/1:dp0/1:w$"):
        check_agreement({"a": one, "b": two, "c": two | {"tp1/2:pp0/1:dp0/1:w": "d"}})


def test_a_later_server_is_compared_with_the_others_by_its_checksums():
    first = Receipt(1, None, None, checksums={"tp0/1:pp0/1:dp0/1:w": "a"})
    assert _differences(first, replace(first, checksums={"tp0/1:pp0/1:dp0/1:w": "b"})) == ["tp0/1:pp0/1:dp0/1:w"]
    assert _differences(first, replace(first, checksums={"tp0/2:pp0/1:dp0/1:w": "b"})) == [] == _differences(first, first)


def test_a_change_that_a_server_may_round_away_is_found_where_nothing_arrived():
    def told(a, b, dtype):
        return [Receipt(1, None, None, checksums={"x:a.w": a, "x:b.w": b}, dtype=dtype, engine="s")]

    for dtype, stale in (("float32", "a.w"), (None, None), ("bfloat16", None)):
        history = ChecksumHistory()
        history.check(told("1", "1", dtype), {"a.w": "1", "b.w": "1"}, "float32")
        if stale is None:
            history.check(told("1", "2", dtype), {"a.w": "2", "b.w": "2"}, "float32")
            with pytest.raises(EngineFailed, match=r"s holds weights as they were before.*: a\.w, b\.w$"):
                history.check(told("1", "2", dtype), {"a.w": "3", "b.w": "3"}, "float32")
        else:
            with pytest.raises(EngineFailed, match=r"s holds weights as they were before.*: a\.w$"):
                history.check(told("1", "2", dtype), {"a.w": "2", "b.w": "2"}, "float32")


def test_a_servers_parameter_is_put_together_from_files():
    assert files_of("model.layers.0.self_attn.qkv_proj.bias") == {f"model.layers.0.self_attn.{each}_proj.bias" for each in "qkv"}
    assert files_of("model.layers.0.mlp.gate_up_proj.weight") == {f"model.layers.0.mlp.{each}_proj.weight" for each in ("gate", "up")}
    assert files_of("model.norm.weight") == {"model.norm.weight"} and files_of("weight") == {"weight"}


def test_layouts_and_devices_that_a_broadcast_cannot_reach_are_refused_by_name():
    sizes = {"tp_size": 2, "pp_size": 1, "dp_size": 1}
    assert no_broadcast(sizes, dp_attention=False) == "" == no_broadcast(sizes | {"dp_size": 2}, dp_attention=True)
    assert "2 stages of a pipeline (--pp-size)" in no_broadcast(sizes | {"pp_size": 2}, dp_attention=False)
    assert "2 replicas (--dp-size)" in no_broadcast(sizes | {"dp_size": 2}, dp_attention=False)
    shared, apart = ServerSites(local_host, LOOPBACK, share_gpus=True), ServerSites(local_host, LOOPBACK)
    with pytest.raises(ValueError, match=r"NCCL, which needs a GPU for the trainer and others for engine.servers, and they share GPUs"):
        check_devices("nccl", shared)
    check_devices("gloo", shared)
    check_devices("nccl", apart)
