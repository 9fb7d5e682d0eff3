"""vLLM servers that take an adapter in place of whole weights: what travels, who is asked for it, and how it is proven."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from tests.engine.engine_setup import DEADLINE_S, reply_to
from tests.engine.test_engine_conformance import model
from tests.engine.test_engine_vllm import RUN, Agreeing, ask, member_of
from tests.engine.vllm_server import FakeVllm, VllmPool, letters
from whet.engine.base import EngineFailed
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import State
from whet.engine.publish import SyncError
from whet.engine.servers.config import ServersConfig
from whet.engine.servers.pool import Servers, least_rank
from whet.engine.servers.start import ServerAddress
from whet.model.config import LoraConfig
from whet.settings.rl import RunConfig
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.adapter import AdapterWriter
from whet.transport.senders import adapter_sender_of
from whet.transport.settings import SyncConfig
from whet.types import Proof

LORA = LoraConfig(rank=2)
AT = ServerAddress(1)
BASE = ("model.norm.weight", "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.down_proj.weight")


def run(play):
    return asyncio.run(asyncio.wait_for(play, DEADLINE_S))


def checksums_of(trained, *names):
    """As a server tells them of weights below an adapter."""
    weights = dict(trained.named_weights())
    told = {name: name.replace("_proj.", "_proj.base_layer.") for name in names}
    return {f"dp0:pp0:pcp0:tp0:{told[name]}": sha256(weights[name].detach().numpy().tobytes()).hexdigest() for name in names}


class Published:
    """A policy with an adapter, and a pool of servers that take it."""

    def __init__(self, num=2, checksums=None):
        self.pool = VllmPool(model(3), num, lora=LORA)
        for server in self.pool.servers:
            server.checksums = checksums
        self.trained = model(3)
        self.backend = TorchBackend(self.trained, TrainConfig(lora=LORA), total_steps=4)
        self.publisher = Agreeing(self.backend, self.trained, self.pool, ThreadPoolExecutor(1))

    def change(self):
        with torch.no_grad():
            for tensor in self.backend.adapter.tensors().values():
                tensor.add_(torch.randn_like(tensor) * 0.1)


def test_the_adapter_travels_alone_and_replies_are_asked_of_it():
    made = Published()

    async def play():
        try:
            found = []
            for version in (0, 1):
                made.change()
                found.append(await made.publisher.publish(version))
                await reply_to(made.pool, ask(f"r{version}"))
            return found
        finally:
            await made.pool.close()

    first, second = run(play())
    sent = {name: tensor.detach() for name, tensor in made.backend.named_weights("adapter")}
    for server in made.pool.servers:
        assert server.label == "1" and len(server.adapters) == 2 and server.adapters[0] != server.adapters[1]
        held = load_file(server.adapters[-1] / "adapter_model.safetensors")
        assert held.keys() == sent.keys() and all(torch.equal(held[name], sent[name]) for name in sent)
        assert not {"/update_weights", "/start_weight_update"} & set(server.calls)
        assert {body["model"] for body in server.bodies} == {"whet-adapter"}
    assert second.receipt.wire_bytes == sum(tensor.nbytes for tensor in sent.values()) > 0
    assert first.proof == second.proof == Proof(arrival=False, memory_share=0.0, probe_nats=0.0)


def test_the_weights_below_an_adapter_are_compared_with_the_trainers_base():
    told = checksums_of(model(3), *BASE)
    made = Published(1, told)

    async def play():
        try:
            made.change()
            proofs = [(await made.publisher.publish(version)).proof for version in (0, 1)]
            made.pool.servers[0].checksums = {**told, next(iter(told)): "0" * 64}
            with pytest.raises(SyncError, match=r"version 2: .* holds other weights than the trainer's: dp0:pp0:pcp0:tp0:model\.norm"):
                await made.publisher.publish(2)
            return proofs
        finally:
            await made.pool.close()

    proofs = run(play())
    num = len(made.backend.adapter.tensors())
    assert [proof.memory_share for proof in proofs] == [len(BASE) / (len(BASE) + num)] * 2, "nobody compares the adapter's own"


def test_a_server_that_is_started_again_gets_the_newest_adapter():
    made = Published(2)

    async def play():
        try:
            made.change()
            await made.publisher.publish(1)
            made.pool.servers[1].die()
            while len(made.pool.servers) < 3 or made.pool.slots[1].state is not State.SERVING:
                await asyncio.sleep(0.01)
        finally:
            await made.pool.close()

    run(play())
    old, _, new = made.pool.servers
    assert new.adapters == old.adapters[-1:] and new.label == "1"


def test_a_server_without_the_route_is_refused_with_what_to_do():
    from whet.engine.vllm.start import Vllm

    server = FakeVllm(model())
    try:
        with pytest.raises(EngineFailed, match=r"has no route /v1/load_lora_adapter; start it with --enable-lora"):
            from whet.engine.servers.http import HttpServer

            Vllm(adapters=True).connect(HttpServer("vllm 0", server.url), None, None)
        member_of(server).stop()
    finally:
        server.die()


def test_what_is_written_is_peft_s_and_no_other_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    trained = model(3)
    writer = AdapterWriter(model(3), LORA, Path("somewhere"))
    backend = TorchBackend(trained, TrainConfig(lora=LORA), total_steps=1)
    with torch.no_grad():
        for tensor in backend.adapter.tensors().values():
            tensor.normal_()
    weights = {name: tensor.detach() for name, tensor in backend.named_weights("adapter")}
    assert writer.write(tmp_path, weights.items()) == sum(tensor.nbytes for tensor in weights.values())
    assert peft.PeftConfig.from_pretrained(tmp_path).r == 2
    with pytest.raises(ValueError, match=r"another than train\.lora's: 1 tensors differ, among them base_model"):
        writer.write(tmp_path, list(weights.items())[1:])


def test_the_base_of_an_adapter_is_the_model_without_it():
    plain = {name: tensor.detach().clone() for name, tensor in model(3).named_weights()}
    backend = TorchBackend(model(3), TrainConfig(lora=LORA), total_steps=1)
    with torch.no_grad():
        for tensor in backend.adapter.tensors().values():
            tensor.normal_()
    base, merged = dict(backend.named_weights("base")), dict(backend.named_weights())
    assert base.keys() == plain.keys() == merged.keys() and all(torch.equal(base[name], plain[name]) for name in plain)
    assert any(not torch.equal(merged[name], plain[name]) for name in plain)


def starts_of(lora, **args):
    config = ServersConfig(name="vllm", vllm={"args": args})
    return Servers(config, Path("model"), letters, lora=lora).starts(model(), PoolConfig())["vllm 0"]


def test_servers_are_started_for_the_adapter_that_trains():
    start = starts_of(LoraConfig(rank=12), enable_lora=True)
    assert start.args == {"max_lora_rank": 16, "enable_lora": True}
    assert start.kind.environment(AT)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert starts_of(LORA, enable_lora=True, max_lora_rank=64).args["max_lora_rank"] == 64
    whole = starts_of(None, enable_lora=True, max_num_seqs=4)
    assert whole.args == {"max_num_seqs": 4} and "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in whole.kind.environment(AT)


@pytest.mark.parametrize(("rank", "least"), [(1, 1), (2, 8), (8, 8), (33, 64), (512, 512)])
def test_the_least_rank_that_vllm_knows_is_chosen(rank, least):
    assert least_rank(rank) == least
    with pytest.raises(ValueError, match=r"train\.lora\.rank is 513, and vLLM takes at most 512"):
        least_rank(513)


def test_a_broadcast_is_refused():
    with pytest.raises(ValueError, match=r"sync\.transport=broadcast sends whole weights"):
        adapter_sender_of(SyncConfig(transport="broadcast"), Path("x"), AdapterWriter(model(), LORA, Path("x")))


@pytest.mark.parametrize(
    ("train", "engine", "words"),
    [
        ({}, {}, "there is no adapter without train.lora"),
        ({"lora": {"rank": 4}}, {"quantization": "fp8"}, "engine.quantization sends whole weights"),
    ],
)
def test_settings_without_an_adapter_to_send_are_refused(train, engine, words):
    settings = {"name": "vllm", "vllm": {"args": {"enable_lora": True}}, **engine}
    with pytest.raises(ValidationError, match=f"engine.vllm.args: enable_lora .*{words}: leave it out"):
        RunConfig.model_validate({**RUN, "batch": {"prompts_per_rollout": 1}, "train": train, "engine": settings})
