"""Weights on CUDA: their digests are the CPU's, another process opens them in place, and a step with them has the same bits twice."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch
from transformers import Qwen3Config

from whet.algo.sft import sft_loss
from whet.core.batch import batch_of
from whet.core.weights import token_mean
from whet.model.causal import random_causal
from whet.model.config import ModelConfig
from whet.model.digest import digests_of, tensor_digest
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.handles import handed, opened
from whet.types import Origin, Sample

pytestmark = pytest.mark.cuda
SHAPE = Qwen3Config(
    vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96,
    tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("size", [0, 1, 3, 1000, 2**18 + 5, 2**20 + 1])
def test_a_digest_is_the_cpus(dtype, size, device):
    bits = torch.randint(0, 255, (size * 8,), generator=torch.Generator().manual_seed(size)).to(torch.uint8)
    tensor = (bits > 127)[:size] if dtype == torch.bool else bits.view(dtype)[:size]
    assert tensor_digest(tensor.to(device)) == tensor_digest(tensor)
    assert tensor_digest(tensor.to(device)[1:]) == tensor_digest(tensor[1:])


def test_digests_of_a_model_are_the_cpus(device):
    here, there = (random_causal(SHAPE, ModelConfig(path="", dtype="bfloat16", device=str(where)), seed=0) for where in ("cpu", device))
    assert digests_of(here.named_weights()) == digests_of(there.named_weights())


def look(connection):
    """The other process: opens what it is told of, and says what it sees."""
    found = opened(connection.recv())
    connection.send((str(found.device.type), found.cpu().numpy().tobytes()))
    connection.recv()
    del found
    connection.send("closed")


def test_another_process_opens_memory_in_place(device):
    data = torch.arange(5000, dtype=torch.float32, device=device).view(torch.uint8)
    description, kept = handed(data)
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=look, args=(theirs,), daemon=True)
    child.start()
    try:
        mine.send(description)
        assert mine.poll(60), "it does not answer"
        kind, found = mine.recv()
        assert (kind, found) == (device.type, data.cpu().numpy().tobytes())
        mine.send("close")
        assert mine.poll(30) and mine.recv() == "closed"
    finally:
        child.join(30)
        if child.is_alive():
            child.kill()
    assert kept.numel() == data.numel()


@pytest.mark.parametrize("rows", ["chains", "forest"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_step_has_the_same_bits_twice(rows, dtype, device, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
    prompt = tuple(range(20))
    samples = [
        Sample((*prompt, *((7 * i + 3 * j) % 97 for j in range(30))), (Origin.PROMPT,) * 20 + (Origin.MODEL,) * 30,
               (False,) * 20 + (True,) * 30, (0.0,) * 50, (-1,) * 20 + (0,) * 30, "g", f"g/{i}")
        for i in range(6)
    ]  # fmt: skip
    batch = batch_of(samples)
    batch = batch.with_(weights=token_mean(batch))
    found = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            model = random_causal(SHAPE, ModelConfig(path="", dtype=dtype, device=str(device)), seed=0)
            backend = TorchBackend(model, TrainConfig(rows=rows), total_steps=4)
            losses = []
            for _ in range(2):
                losses.append(backend.forward_backward(batch, sft_loss).loss)
                backend.optim_step()
            found.append((losses, digests_of(model.named_weights())))
    finally:
        torch.use_deterministic_algorithms(False)
    assert found[0] == found[1]
