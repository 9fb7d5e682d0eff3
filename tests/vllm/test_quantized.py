"""Quantized rollouts of a real vLLM server: INT4 weights, written from the trainer's at each update."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.vllm.servers import ARGS, starter
from tests.vllm.test_vllm import PROMPT, begin, run, settings, tokens_of, trained
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Slot
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.weights import WeightSync
from whet.engine.publish import EnginePublisher, SyncError
from whet.engine.servers.pool import names_in_format
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.model.quantization_folder import named_format, quantize_folder
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport import quantize as quantize_module
from whet.transport.quantize import QuantizingStream
from whet.transport.senders import sender_of
from whet.transport.settings import SyncConfig
from whet.types import Request, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def quantization(folder):
    return named_format("int4", folder)


@pytest.fixture(scope="module")
def member(folder, decode, quantization, tmp_path_factory):
    start = tmp_path_factory.mktemp("int4") / "model"
    quantize_folder(folder, start, quantization, torch.bfloat16, 2**30)
    names = names_in_format(trained(folder), quantization)
    made = starter("vllm 0", start, decode, names, {"dtype": "bfloat16"})(threading.Event())
    yield made
    made.stop()


def pool_of(member, model, quantization, versions, transport="disk"):
    bare, config = without_contents(model), PoolConfig(restarts=0)
    sender = sender_of(SyncConfig(transport=transport), bare, versions, "127.0.0.1", quantization)
    slots = [Slot(member.name, lambda _: pytest.fail("the server was lost"), member, breaker_of(config))]
    quantize = partial(QuantizingStream, naming=Naming(bare), quantization=quantization)
    weights = WeightSync(sender, dict(bare.named_weights()), quantize)
    return EnginePool(slots, weights, config, deterministic=False, tolerance=1.0, quantization_nats=quantization.nats)


def publish(pool, model, version):
    async def published():
        with ThreadPoolExecutor(1) as thread:
            return await EnginePublisher(TorchBackend(model, TrainConfig(), None), model, pool, thread).publish(version)

    return run(published())


def unpacked(version: Path):
    """A version's weights as the integers times their steps, one by one."""
    files = load_file(version / "model.safetensors")
    out = {name: each for name, each in files.items() if not name.endswith(("_packed", "_scale", "_shape"))}
    for name, packed in files.items():
        if name.endswith("_packed"):
            layer = name.removesuffix("_packed")
            rows, columns = files[layer + "_shape"].tolist()
            values = torch.stack([(packed >> (4 * place)) & 15 for place in range(8)], 2).flatten(1)[:, :columns] - 8
            steps = files[layer + "_scale"]
            out[layer] = (values.view(rows, steps.shape[1], -1) * steps[:, :, None].float()).flatten(1)
    return out


def test_a_server_in_int4_computes_with_what_was_written_and_is_proven_to_hold_it(folder, member, quantization):
    versions = Path(mkdtemp(prefix="whet-int4-"))
    model = trained(folder, seed=3)
    pool = pool_of(member, model, quantization, versions)
    found = publish(pool, model, 1)
    assert 0 < found.proof.probe_nats < quantization.nats and 0 < found.proof.memory_share < 1
    assert found.receipt.sent is not None and found.receipt.members[0].wire == found.receipt.sent
    assert any(name.endswith("weight_packed") for name in found.receipt.sent)

    async def sample():
        return [chunk async for chunk in member.generate(Request("q", PROMPT, SamplingParams(60)))]

    chunks = run(sample())
    tokens = [*PROMPT, *tokens_of(chunks)]
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    judge.load_state_dict({name: weight.float() for name, weight in unpacked(versions / "version_000001").items()}, strict=False)
    judge.tie_weights()
    with torch.no_grad():
        logprobs = judge(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = [float(logprobs[place - 1, tokens[place]]) for place in range(len(PROMPT), len(tokens))]
    got = [each for chunk in chunks for each in chunk.logprobs]
    assert torch.tensor(got).sub(torch.tensor(expected)).abs().mean() < 0.02, "they differ by what bfloat16 rounds"


def test_quantized_weights_come_by_broadcast_too(folder, member, quantization, tmp_path):
    model = trained(folder, seed=5)
    found = publish(pool_of(member, model, quantization, tmp_path, "broadcast"), model, 2)
    assert 0 < found.proof.probe_nats < quantization.nats and found.receipt.members[0].wire == found.receipt.sent


@pytest.mark.parametrize("transport", ["disk", "broadcast"])
def test_a_run_samples_from_a_server_in_int4_and_says_how_far_it_is_from_the_trainer(folder, tmp_path, transport):
    table = settings(folder, tmp_path / "run", 2, sync={"transport": transport})
    table["engine"] |= {"servers": 1, "quantization": "int4", "vllm": {"args": ARGS | {"dtype": "bfloat16"}}}
    (tmp_path / "run.json").write_text(json.dumps(table))
    out, _ = (process := begin(table, tmp_path)).communicate(timeout=400)
    assert process.returncode == 0, out[-3000:]
    assert "engine.quantization=int4 samples from other weights than train, and nothing corrects" in out
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "reward/total" in row]
    assert len(steps) == 2 and all(1e-3 < row["mismatch/logprob_mean"] < 0.5 for row in steps)
    assert all(0 < row["sync/probe_nats"] < 4 for row in rows if "sync/probe_nats" in row)


def test_another_weight_than_was_written_is_found(folder, member, quantization, monkeypatch):
    """A file changes on its way: one packed word of one layer."""
    model = trained(folder, seed=4)
    plain = quantize_module.digests_of

    def before_it_changed(named):
        found = plain(named)
        for name, tensor in named:
            if name.endswith("layers.1.mlp.down_proj.weight_packed"):
                tensor[3, 5] ^= 0x30
        return found

    monkeypatch.setattr(quantize_module, "digests_of", before_it_changed)
    pool = pool_of(member, model, quantization, Path(mkdtemp(prefix="whet-int4-")))
    with pytest.raises(SyncError, match=r"vllm 0 received other weights than the trainer's: model\.layers\.1\.mlp\.down_proj\.weight_pack"):
        publish(pool, model, 3)
