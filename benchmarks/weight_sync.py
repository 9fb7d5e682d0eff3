"""What a version of weights takes from one process to another, by each transport, against the machine's memory-copy limit; and how large
differences are after steps of AdamW in bfloat16.

    python benchmarks/weight_sync.py            # 42 million parameters
    python benchmarks/weight_sync.py 38M 110M

Seconds are medians of the rounds, from the announcement of a version until the other process has it in tensors of its own (`shared`: until
it may read the common ones), without digests, whose speed is a row of its own. GB/s are bytes of tensors, whatever travels, by these
seconds. The steps are whet's own backend on random rows; changes are against the version before. Figures go to
benchmarks/results/weight_sync.json.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import torch
from forest_rows import group
from machine import RESULTS, machine
from transformers import Qwen3Config

from whet.algo.sft import sft_loss
from whet.model.causal import CausalModel, random_causal
from whet.model.config import ModelConfig
from whet.model.digest import digests_of
from whet.model.meta import without_contents
from whet.model.naming import Naming
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.apply import copy_weights
from whet.transport.base import Stream
from whet.transport.changes import change_of
from whet.transport.receive import Receiver
from whet.transport.senders import sender_of
from whet.transport.settings import SyncConfig

ROUNDS = 5
TIMEOUT_S = 60
"""Seconds that a version may take."""
SHAPES = {"2M": (4, 128), "38M": (12, 512), "110M": (16, 768)}
"""Layers and width, by millions of parameters or so."""
TRANSPORTS = ("shared", "ipc", "broadcast", "disk", "delta")
RATES = (1e-6, 1e-4)
STEPS = 3


def model(size: str, device: str = "cpu") -> CausalModel:
    layers, width = SHAPES[size]
    config = Qwen3Config(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, vocab_size=8192, num_attention_heads=width // 64,
        num_key_value_heads=width // 128, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip
    return random_causal(config, ModelConfig(path=size, device=device, dtype="bfloat16"), seed=0)


def receive(connection: Connection, size: str, device: str = "cpu") -> None:
    """The other process: opens tickets, and says when it has the weights."""
    torch.set_num_threads(1)
    own = model(size, device)
    receiver = Receiver("engine", own, lambda: dict(own.named_weights()), lambda: Naming(without_contents(own)))
    connection.send("ready")
    while (ticket := connection.recv()) is not None:
        if type(ticket).__name__ != "SharedTicket":
            copy_weights(dict(own.named_weights()), Stream(receiver.open(ticket)), digest=False)
        if device != "cpu":
            torch.cuda.synchronize()
        connection.send("done")


def carried(size: str) -> list[dict[str, object]]:
    """A row for each transport; between two rounds the weights change as by a step."""
    trained = model(size)
    num_bytes = sum(tensor.nbytes for _, tensor in trained.named_weights())
    rows = [limits(trained, num_bytes)]
    mine, theirs = multiprocessing.get_context("spawn").Pipe()
    child = multiprocessing.get_context("spawn").Process(target=receive, args=(theirs, size))
    child.start()
    assert mine.recv() == "ready"
    for transport in TRANSPORTS:
        seconds, sent = versions_by(transport, trained, model(size), mine)
        took = median(seconds[1:])
        speed = {"seconds": round(took, 4), "gb_per_s": round(num_bytes / took / 1e9, 2)}
        rows.append({"what": transport, **speed, "mb_sent": round(sent / 1e6, 2)})
        print(json.dumps(rows[-1]))
    mine.send(None)
    child.join()
    return [{"size": size, "mb": round(num_bytes / 1e6, 1), **row} for row in rows]


def versions_by(transport: str, trained: CausalModel, engines: CausalModel, mine: Connection) -> tuple[list[float], int]:
    """Seconds of each version, the first of which warms up, and bytes that were sent of the last.

    Args:
        transport: as in `[sync]`.
        trained: whose weights are sent; they change before each version.
        engines: a model of the same shape, whose tensors are those that are shared where the transport is.
        mine: the connection to the process that runs `receive`.
    """
    seconds, sent = list[float](), 0
    with tempfile.TemporaryDirectory() as folder:
        sender = sender_of(SyncConfig(transport=transport, timeout_s=TIMEOUT_S), engines, Path(folder), "127.0.0.1")
        for version in range(ROUNDS + 1):
            nudge(trained)
            if trained.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            ticket = sender.begin(version, ["engine"])
            if sender.simultaneous:
                mine.send(ticket)
            sent = sender.send(ticket, Stream(trained.named_weights())).size_bytes
            if not sender.simultaneous:
                mine.send(ticket)
            if not mine.poll(TIMEOUT_S):
                raise TimeoutError(f"the other process does not have version {version} after {TIMEOUT_S} s")
            assert mine.recv() == "done"
            seconds.append(time.perf_counter() - began)
        sender.close()
    return seconds, sent


def limits(trained: CausalModel, num_bytes: int) -> dict[str, object]:
    """The best copy of as many bytes, and the speed of digests."""
    source = torch.cat([tensor.detach().view(-1) for _, tensor in trained.named_weights()])
    target = torch.empty_like(source)

    def best(work: object) -> float:
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            work()  # type: ignore[operator]
            times.append(time.perf_counter() - began)
        return min(times)

    copy, digest = best(lambda: target.copy_(source)), best(lambda: digests_of(trained.named_weights()))
    row = {"what": "memory copy", "seconds": round(copy, 4), "gb_per_s": round(num_bytes / copy / 1e9, 2)}
    return row | {"digest_gb_per_s": round(num_bytes / digest / 1e9, 2)}


def nudge(trained: CausalModel) -> None:
    """About 1 element in 100 changes by a bit or so."""
    with torch.no_grad():
        for _, tensor in trained.named_weights():
            flat = tensor.view(-1)
            flat[torch.randint(100, (1,)).item() :: 100] *= 1.004


def differences(size: str, rate: float) -> dict[str, object]:
    """Bytes of differences and elements that changed, after each of some steps at a constant rate."""
    trained = model(size)
    settings = {"optim": {"lr": rate, "schedule": "constant", "warmup_steps": 0}}
    backend = TorchBackend(trained, TrainConfig.model_validate(settings), total_steps=100)
    rows = []
    for step in range(STEPS):
        before = {name: tensor.detach().clone() for name, tensor in trained.named_weights()}
        backend.forward_backward(group(32, 32 + step), sft_loss)
        backend.optim_step()
        changes = [change_of(before[name], tensor.detach()) for name, tensor in trained.named_weights()]
        num_elements = sum(tensor.numel() for tensor in before.values())
        packed, whole = sum(len(change.packed) for change in changes), sum(tensor.nbytes for tensor in before.values())
        changed = sum(change.num_changed for change in changes) / num_elements
        rows.append({"changed": round(changed, 5), "share_of_bytes": round(packed / whole, 5)})
    out: dict[str, object] = {"size": size, "lr": rate, "steps": rows}
    print(json.dumps(out))
    return out


def main(sizes: list[str]) -> None:
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    rows = [row for size in sizes for row in carried(size)]
    delta = [differences(sizes[0], rate) for rate in RATES]
    load = {"before": before, "after": os.getloadavg()[0]}
    command = " ".join(["python benchmarks/weight_sync.py", *sizes])
    out = {"command": command, "machine": machine(), "load_1min": load, "rounds": ROUNDS, "transports": rows, "differences": delta}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "weight_sync.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:] or ["38M"])
