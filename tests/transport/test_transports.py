"""Weights arrive to the bit by every transport, or not at all: what is cut, late, damaged or of another base is named."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from whet.engine.base import EngineLost
from whet.model.attention import PackedRow
from whet.model.causal import load_causal, random_causal
from whet.model.config import ModelConfig
from whet.model.digest import digests_of
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.transport import changes
from whet.transport import deliver as delivering
from whet.transport.apply import copy_weights
from whet.transport.base import BroadcastTicket, DeltaTicket, DiskTicket, OtherBase, Stream, TransportError
from whet.transport.broadcast import BroadcastSender
from whet.transport.delta import CHANGES, HEADER
from whet.transport.handles import handed, opened
from whet.transport.receive import Receiver
from whet.transport.senders import sender_of
from whet.transport.settings import SyncConfig

SHAPE = Qwen3Config(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=48,
    tie_word_embeddings=True,
)
Q = "model.layers.0.self_attn.q_proj.weight"
DEVICE = os.environ.get("WHET_TEST_DEVICE", "cpu")


def model(seed=0, dtype="bfloat16"):
    return random_causal(SHAPE, ModelConfig(path="", device=DEVICE, dtype=dtype), seed=seed)


def step(trained, seed=0):
    """What a small step does: some elements change, one becomes a negative zero, one NaN."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, tensor in trained.named_weights():
            tensor.add_(torch.randn_like(tensor) * 1e-3)
        dict(trained.named_weights())[Q][0, :2] = torch.tensor([-0.0, float("nan")])


class Engine:
    """The receiving end: a model of its own."""

    def __init__(self, name, seed=9, dtype="bfloat16"):
        self.model, self.version = model(seed, dtype), None
        self.receiver = Receiver(name, None, lambda: dict(self.model.named_weights()), lambda: Naming(without_contents(self.model)))

    def take(self, ticket):
        self.receiver.check(ticket, self.version)
        self.version = None
        arrived = copy_weights(dict(self.model.named_weights()), Stream(self.receiver.open(ticket)))
        self.version = ticket.version
        return arrived


def sender(transport, folder, **settings):
    return sender_of(SyncConfig(transport=transport, timeout_s=20, **settings), model(), folder, "127.0.0.1")


def deliver(sending, engines, trained, version, weights=None):
    """One version to all; returns what was sent and what arrived where."""
    ticket = sending.begin(version, list(engines))
    weights = Stream(trained.named_weights()) if weights is None else weights
    with ThreadPoolExecutor(1 + len(engines)) as pool:
        sent = pool.submit(sending.send, ticket, weights)
        if not sending.simultaneous:
            sent.result(30)
        arrived = [pool.submit(engine.take, ticket) for engine in engines.values()]
        return sent.result(30), [found.result(30) for found in arrived]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("transport", ["ipc", "broadcast", "disk", "delta"])
def test_every_transport_carries_every_bit_version_after_version(transport, dtype, tmp_path):
    if transport == "ipc" and DEVICE != "cpu":
        pytest.skip("CUDA lets no process open its own memory: tests/gpu has another one open it")
    trained = model(dtype=dtype)
    sending = sender_of(SyncConfig(transport=transport, timeout_s=20), trained, tmp_path, "127.0.0.1")
    engines = {name: Engine(name, dtype=dtype) for name in ("a", "b")}
    for version in (1, 2, 3):
        step(trained, version)
        sent, arrived = deliver(sending, engines, trained, version)
        expected = digests_of(trained.named_weights())
        assert sent.size_bytes > 0
        for engine, found in zip(engines.values(), arrived, strict=True):
            assert found.digests == digests_of(engine.model.named_weights()) == expected
            assert digests_of(engine.model.named_state()) == digests_of(trained.named_state())
    sending.close()


def test_a_small_buffer_is_never_exceeded_and_large_tensors_go_alone():
    """As the stream is read, no more than the buffer's bytes have been read and not yet been received."""
    tensors = {f"t{i}": torch.randn(1 + 40_000 * (i % 3)) for i in range(12)} | {"huge": torch.randn(700_000)}
    sending = BroadcastSender("127.0.0.1", 20, 2**20)
    ticket = sending.begin(1, ["a"])
    got, behind = [], []

    def weights():
        for name, tensor in tensors.items():
            behind.append(sum(tensors[n].nbytes for n in list(tensors)[: list(tensors).index(name)]) - sum(t.nbytes for _, t in got))
            yield name, tensor

    def receive():
        for name, tensor in Receiver("a", None, dict, dict).open(ticket):
            time.sleep(0.01)
            got.append((name, tensor.clone()))

    thread = threading.Thread(target=receive)
    thread.start()
    sending.send(ticket, Stream(weights()))
    thread.join(20)
    assert digests_of(got) == digests_of(tensors.items())
    assert 0 < max(behind) <= 3 * 2**20  # two buckets, and what a gloo socket holds


def test_engines_may_come_and_go(tmp_path):
    trained, sending = model(), sender("broadcast", tmp_path)
    first, second = Engine("a"), Engine("b")
    deliver(sending, {"a": first}, trained, 1)
    step(trained)
    deliver(sending, {"a": first, "b": second}, trained, 2)
    step(trained)
    deliver(sending, {"b": second}, trained, 3)
    assert digests_of(second.model.named_weights()) == digests_of(trained.named_weights()) != digests_of(first.model.named_weights())
    with pytest.raises(TransportError, match="waits for the next version"):
        sending.whole(3)


def test_an_engine_that_stops_reading_is_named(tmp_path):
    sending = BroadcastSender("127.0.0.1", 2.0, 2**20)
    ticket = sending.begin(1, ["a", "b"])
    assert isinstance(ticket, BroadcastTicket)
    late = threading.Event()

    def stop_early():
        weights = Receiver("b", None, dict, dict).open(ticket)
        next(weights)
        late.wait(20)

    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(lambda: list(Receiver("a", None, dict, dict).open(ticket)))
        pool.submit(stop_early)
        began = time.monotonic()
        with pytest.raises(TransportError, match=r"version 1: the broadcast broke off, as far as can be told by b:"):
            sending.send(ticket, Stream(model().named_weights()))
        assert time.monotonic() - began < 10
        late.set()
        assert len(whole.result(20)) > 5


def test_an_engine_that_does_not_come_is_named_and_those_that_came_are_told(tmp_path):
    sending = BroadcastSender("127.0.0.1", 1.0, 2**20)
    ticket = sending.begin(1, ["a", "b"])
    with ThreadPoolExecutor(1) as pool:
        came = pool.submit(lambda: list(Receiver("a", None, dict, dict).open(ticket)))
        with pytest.raises(TransportError, match=r"as far as can be told by b: not all came within 1 s \(sync\.timeout_s\)"):
            sending.send(ticket, Stream(model().named_weights()))
        assert not came.done(), "that is told first"
        sending.give_up()
        with pytest.raises(TransportError, match="the sender has called it off"):
            came.result(5)


def test_nobody_waits_for_who_does_not_come_once_it_is_given_up():
    sending = BroadcastSender("127.0.0.1", 600.0, 2**20)
    ticket = sending.begin(1, ["a", "b"])
    with ThreadPoolExecutor(2) as pool:
        came = pool.submit(lambda: list(Receiver("a", None, dict, dict).open(ticket)))
        sent = pool.submit(sending.send, ticket, Stream(model().named_weights()))
        while not (sending._rendezvous and sending._rendezvous._is_set("got/a")):
            time.sleep(0.01)
        sending.give_up()
        with pytest.raises(TransportError, match=r"by b: an engine ended"):
            sent.result(5)
        sending.give_up()
        with pytest.raises(TransportError, match="called it off"):
            came.result(5)


class Together:
    """A sender in one exchange with all engines; it waits for them, and fails when it is told to."""

    simultaneous, timeout_s = True, 2.0

    def __init__(self, fails=None):
        self.fails, self.over = fails, threading.Event()

    def begin(self, version, receivers):
        return DiskTicket(version, None)

    def send(self, ticket, weights):
        if self.fails is not None:
            raise self.fails
        self.over.wait(10)
        if self.told:
            raise TransportError("an engine ended")

    told = False

    def give_up(self):
        self.told = True
        self.over.set()


@pytest.mark.parametrize("slow_s", [0.0, 0.2])
def test_what_came_first_is_told_and_not_what_followed_from_it(slow_s):
    """Whoever is first in the list of engines."""
    sending = Together()

    async def healthy(ticket):
        await asyncio.to_thread(sending.over.wait, 10)
        raise TransportError("the group has ended")

    async def dies(ticket):
        await asyncio.sleep(slow_s)
        raise EngineLost("b died")

    async def dies_later(ticket):
        await asyncio.sleep(0.5)
        raise EngineLost("d died")

    loads = {"a": healthy, "d": dies_later, "b": dies, "c": healthy}
    with pytest.raises(EngineLost, match="b died"):
        asyncio.run(delivering.deliver(sending, [], 1, loads))


def test_a_version_that_is_given_up_from_outside_holds_nothing_up():
    sending = Together()

    async def hangs(ticket):
        await asyncio.sleep(60)

    async def main():
        task = asyncio.ensure_future(delivering.deliver(sending, [], 1, {"a": hangs}))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sending.told


def test_who_does_not_answer_after_a_failed_exchange_is_not_the_cause(monkeypatch):
    monkeypatch.setattr(delivering, "LAST_WORDS_S", 0.2)
    sending = Together(TransportError("broke off by b"))

    async def hangs(ticket):
        await asyncio.sleep(60)

    with pytest.raises(TransportError, match="broke off by b"):
        asyncio.run(delivering.deliver(sending, [], 1, {"a": hangs, "b": hangs}))
    assert sending.told


def test_a_receiver_that_goes_away_ends_the_broadcast(tmp_path):
    sending = sender("broadcast", tmp_path)
    ticket = sending.begin(1, ["a"])

    def leave():
        weights = Receiver("a", None, dict, dict).open(ticket)
        next(weights)
        weights.close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(leave)
        with pytest.raises(TransportError, match="version 1: the broadcast broke off"):
            sending.send(ticket, Stream((f"t{i}", torch.zeros(600_000)) for i in range(400)))


def test_a_stream_that_fails_is_told_to_the_receivers(tmp_path):
    sending = sender("broadcast", tmp_path)
    ticket = sending.begin(1, ["a"])

    def weights():
        yield "t", torch.zeros(3)
        raise RuntimeError("no memory left")

    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(lambda: list(Receiver("a", None, dict, dict).open(ticket)))
        with pytest.raises(RuntimeError, match="no memory left"):
            sending.send(ticket, Stream(weights()))
        with pytest.raises(TransportError, match="the trainer broke off the stream"):
            received.result(20)


def test_a_version_on_disk_is_a_hugging_face_folder_and_the_last_ones_stay(tmp_path):
    trained, sending = model(), sender("disk", tmp_path, max_buffer_bytes=2**20)
    for version in (1, 2, 3):
        step(trained, version)
        with torch.no_grad():
            dict(trained.named_weights())[Q][0, 1] = 0.5  # transformers' check wants finite numbers
        deliver(sending, {"a": Engine("a")}, trained, version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version_000002", "version_000003"]
    read = load_causal(tmp_path / "version_000003", ModelConfig(path="", device=DEVICE, dtype="bfloat16"), trainable=False)
    assert digests_of(read.named_state()) == digests_of(trained.named_state())


MOE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 61}
MIXTURES = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **MOE, num_experts_per_tok=2, num_key_value_heads=1, head_dim=16, moe_intermediate_size=16, num_experts=4
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **MOE,
        num_experts_per_tok=2,
        num_key_value_heads=2,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        moe_intermediate_size=16,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        n_shared_experts=1,
    ),
}


def logits_of(trained, tokens):
    row = PackedRow([tokens.shape[1]], torch.device("cpu"))
    return trained.logits(trained.hidden(tokens[0], row.positions, row))


@pytest.mark.parametrize("transport", ["disk", "delta"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_folder_of_a_mixture_has_the_names_of_files_and_what_no_gradient_changes(kind, transport, tmp_path):
    """transformers alone reads it, and computes what the trainer computes; so does an engine."""
    trained, held = (random_causal(MIXTURES[kind](), ModelConfig(path="", device="cpu"), seed=seed) for seed in (0, 1))
    biases = [buffer for name, buffer in trained.saved_buffers()]
    assert len(biases) == (kind == "deepseek_v3")
    for buffer in biases:
        buffer.normal_()
    for mine, theirs in zip(biases, (buffer for _, buffer in held.saved_buffers()), strict=True):
        theirs.copy_(mine)
    sending = sender_of(SyncConfig(transport=transport, timeout_s=20), trained, tmp_path, "127.0.0.1")
    engine = Engine("a")
    engine.model = held
    deliver(sending, {"a": engine}, trained, 1)
    assert digests_of(held.named_state()) == digests_of(trained.named_state())
    hf, told = AutoModelForCausalLM.from_pretrained(tmp_path / "version_000001", dtype=torch.float32, output_loading_info=True)
    assert not any(told.values()), told
    tokens = torch.tensor([[3, 14, 15, 9, 26, 5]])
    with torch.no_grad():
        assert torch.allclose(hf.eval()(input_ids=tokens).logits, logits_of(trained, tokens), atol=1e-5)


def test_a_full_disk_leaves_the_version_before_whole(tmp_path, monkeypatch):
    trained, sending = model(), sender("disk", tmp_path)
    deliver(sending, {"a": Engine("a")}, trained, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("whet.transport.folder.write_weights", full)
    with pytest.raises(TransportError, match=r"version 2 cannot be written to .*: No space left on device"):
        deliver(sending, {"a": Engine("a")}, trained, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["version_000001"]
    Engine("b").take(DiskTicket(1, tmp_path / "version_000001"))


def test_a_file_of_weights_that_is_cut_short_is_named(tmp_path):
    trained, sending = model(), sender("disk", tmp_path)
    deliver(sending, {"a": Engine("a")}, trained, 1)
    file = tmp_path / "version_000001/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(TransportError, match=r"model\.safetensors is cut short or damaged"):
        Engine("b").take(DiskTicket(1, tmp_path / "version_000001"))


@pytest.fixture
def delta(tmp_path):
    """A sender whose second version is on disk, and an engine at the first."""
    trained, sending = model(), sender("delta", tmp_path)
    engine = Engine("a")
    deliver(sending, {"a": engine}, trained, 1)
    step(trained)
    ticket = sending.begin(2, ["a"])
    sending.send(ticket, Stream(trained.named_weights()))
    return sending, ticket, engine, trained


def test_an_engine_of_another_base_asks_for_the_whole(delta):
    sending, ticket, engine, trained = delta
    assert ticket == DeltaTicket(2, 1, ticket.folder)
    other = Engine("b")
    before = digests_of(other.model.named_weights())
    for version, words in ((None, "half of a version"), (0, "version 0")):
        other.version = version
        with pytest.raises(OtherBase, match=f"against version 1, and this engine holds {words}"):
            other.take(ticket)
    assert digests_of(other.model.named_weights()) == before
    other.take(sending.whole(2))
    engine.take(ticket)
    assert digests_of(other.model.named_weights()) == digests_of(engine.model.named_weights()) == digests_of(trained.named_weights())


def test_engines_that_ask_for_the_whole_at_once_get_one_folder(delta, monkeypatch):
    """Each would remove the other's draft."""
    sending, *_ = delta
    write, writing = sending._write_whole, []

    def slowly(version):
        writing.append(version)
        time.sleep(0.1)
        return write(version)

    monkeypatch.setattr(sending, "_write_whole", slowly)
    with ThreadPoolExecutor(3) as pool:
        tickets = [asked.result(20) for asked in [pool.submit(sending.whole, 2) for _ in range(3)]]
    assert writing == [2] and len(set(tickets)) == 1 and tickets[0].folder.is_dir()


def test_a_folder_that_is_not_to_be_seen_names_the_setting(delta, tmp_path):
    _, _, engine, _ = delta
    for elsewhere in (DeltaTicket(2, 1, tmp_path / "elsewhere"), DiskTicket(2, tmp_path / "elsewhere")):
        with pytest.raises(TransportError, match=r"elsewhere is not to be seen on .*; sync\.folder must lie on a file system that"):
            list(engine.receiver.open(elsewhere))


def test_a_flipped_byte_in_what_changed_is_named(delta):
    _, ticket, engine, _ = delta
    data = bytearray((ticket.folder / CHANGES).read_bytes())
    data[len(data) // 2] ^= 1
    (ticket.folder / CHANGES).write_bytes(data)
    with pytest.raises(TransportError, match=r"model\.[a-z0-9_.]+: what changed has another checksum"):
        engine.take(ticket)
    assert engine.version is None


def test_changes_of_other_versions_are_refused(delta):
    _, ticket, engine, _ = delta
    with pytest.raises(TransportError, match="has the changes from version 1 to 2, not from version 1 to 3"):
        list(engine.receiver.open(DeltaTicket(3, 1, ticket.folder)))
    (ticket.folder / HEADER).unlink()
    with pytest.raises(TransportError, match="cannot be read: FileNotFoundError"):
        list(engine.receiver.open(ticket))


def test_after_a_failed_delta_the_next_version_is_whole(delta, monkeypatch):
    sending, _, engine, trained = delta
    step(trained, 3)

    def broken(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("whet.transport.delta.change_of", broken)
        with pytest.raises(TransportError, match="No space left"):
            deliver(sending, {"a": engine}, trained, 3)
    assert isinstance(sending.begin(4, ["a"]), DiskTicket)
    deliver(sending, {"a": engine}, trained, 4)
    assert digests_of(engine.model.named_weights()) == digests_of(trained.named_weights())


def test_weights_of_another_model_are_no_changes(delta):
    sending, *_ = delta
    with pytest.raises(ValueError, match="t is not a weight of version 2"):
        sending.send(sending.begin(3, ["a"]), [("t", torch.zeros(2))])


def test_few_changes_are_few_bytes():
    old = torch.randn(200_000).to(torch.bfloat16)
    new = old.clone()
    new[::1000] *= 1.01
    change = changes.change_of(old, new)
    assert change.kind == "gaps" and change.num_changed == int((old != new).sum()) and len(change.packed) < 1000
    assert changes.change_of(old, old).packed == b""


def test_memory_is_opened_by_others_on_this_machine_alone(monkeypatch):
    """Nothing is copied on the other side: what is written here afterwards is seen there."""
    data = torch.arange(5000, dtype=torch.float32).view(torch.uint8)
    description, kept = handed(data)
    there = opened(description)
    assert torch.equal(there, data)
    kept[:4] = 7
    assert there[:4].tolist() == [7] * 4
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    with pytest.raises(TransportError, match=r"this is elsewhere: sync.transport=ipc is for engines on one machine"):
        opened(description)


def test_a_gpu_that_is_not_seen_is_told():
    told = json.dumps([socket.gethostname(), 4, ["cuda", "GPU-1", ["00"], 0]]).encode()
    with pytest.raises(TransportError, match="the trainer's GPU GPU-1 is none that this process sees"):
        opened(told)
