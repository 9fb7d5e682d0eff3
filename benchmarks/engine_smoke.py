"""A server of vLLM or SGLang, tried as a run would use it: log-probs, pauses, aborts, and two weight updates with their proofs.

    python benchmarks/engine_smoke.py URL MODEL_FOLDER [--kind vllm|sglang] [--transport disk broadcast] [--folder SHARED]
        [--dtype bfloat16] [--device cpu]

MODEL_FOLDER is what the server was started with; SHARED a folder that the server sees under the same path. New weights go by each transport
in turn: by disk, and to SGLang's routes by a broadcast, too. The broadcast is over NCCL if the model is on a GPU here, which must not be
the server's; `--device cpu` has it go over gloo. The server ends with the weights that it began with. The key is read from
WHET_ENGINE_KEY. Figures go to standard output as JSON; the status is 0 if all holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from machine import machine

from whet.algo.base import Need
from whet.build.engine import address_of
from whet.check.findings import line
from whet.check.server import AREAS, doctor_server, identify
from whet.core.batch import batch_of
from whet.engine.base import SCORE_TOLERANCE
from whet.engine.pool.config import PoolConfig
from whet.engine.pool.member import Slot
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.weights import WeightSync
from whet.engine.publish import EnginePublisher
from whet.engine.servers.pool import KINDS, direct_names
from whet.engine.servers.start import ServerAt
from whet.model.causal import CausalModel, load_causal
from whet.model.config import ModelConfig
from whet.model.meta import without_contents
from whet.train.torch_native.backend import TorchBackend
from whet.train.torch_native.config import TrainConfig
from whet.transport.senders import server_sender_of
from whet.transport.settings import SyncConfig, Syncing
from whet.types import Finish, Request, SamplingParams
from whet.types.columns import Ints, Runs
from whet.types.records import unsampled

NUM, LENGTH = 16, 96
LIMIT_S = 1800


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model", type=Path)
    parser.add_argument("--kind", choices=sorted(KINDS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--transport", nargs="+", choices=["disk", "broadcast"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    if doctor_server(asked.url, lambda finding: print(line(finding, AREAS), file=sys.stderr))["failed"]:
        return 2
    kind = asked.kind or identify(asked.url, None).kind
    config = ModelConfig(path=str(asked.model), dtype=asked.dtype, device=asked.device)
    model = load_causal(asked.model, config, trainable=True)
    found: dict[str, Any] = {"kind": kind, "url": asked.url}
    for transport in asked.transport or (["disk", "broadcast"] if KINDS[kind].own_routes else ["disk"]):
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            sync = Syncing(SyncConfig.model_validate({"transport": transport}), Path(folder))
            found[transport] = asyncio.run(asyncio.wait_for(tried(kind, asked.url, model, sync), LIMIT_S))
    print(json.dumps({"command": " ".join(["python benchmarks/engine_smoke.py", *sys.argv[1:]]), "machine": machine(), **found}, indent=1))
    return 0


async def tried(kind: str, url: str, model: CausalModel, sync: Syncing) -> dict[str, Any]:
    start = ServerAt(KINDS[kind], kind, url, lambda tokens: "", direct_names(model), 60.0)
    member = await asyncio.to_thread(start, threading.Event())
    config, bare = PoolConfig(restarts=0), without_contents(model)
    own_routes = ("nccl" if model.device.type == "cuda" else "gloo") if KINDS[kind].own_routes else None
    sender = server_sender_of(sync.config, bare, sync.folder, address_of([url]), own_routes)
    weights = WeightSync(sender, dict(bare.named_weights()))
    slot = Slot(kind, start, member, breaker_of(config))
    pool = EnginePool([slot], weights, config, deterministic=False, tolerance=SCORE_TOLERANCE[model.dtype])
    out: dict[str, Any] = {}
    with ThreadPoolExecutor(1) as thread:
        backend = TorchBackend(model, TrainConfig(), None)
        publisher = EnginePublisher(backend, model, pool, thread)
        try:
            out["first weights"] = await replies_and_logprobs(pool, backend, model.vocab_size)
            await keeps_tokens(pool, model.vocab_size)
            own = [weight.detach().clone() for _, weight in model.named_weights()]
            for version, name in ((1, "other weights"), (2, "first weights again")):
                change(model, own, by=0.02 if version == 1 else 0.0)
                began = time.perf_counter()
                publication = await publisher.publish(version)
                out[name] = {
                    "update_s": time.perf_counter() - began,
                    "probe_nats": publication.proof.probe_nats,
                    "proven_share": publication.proof.memory_share,
                    "checksums": len(publication.receipt.members[0].checksums or ()),
                } | await replies_and_logprobs(pool, backend, model.vocab_size)
        finally:
            await pool.close()
            pool.end()
    return out


def change(model: CausalModel, own: list[torch.Tensor], by: float) -> None:
    """The model's weights as they were, and noise of so much of their size."""
    torch.manual_seed(0)
    with torch.no_grad():
        for (_, weight), before in zip(model.named_weights(), own, strict=True):
            weight.copy_(before + by * before.std() * torch.randn_like(before) if by and before.numel() > 1 else before)


def asked_for(i: int, vocab_size: int, **more: Any) -> Request:
    prompt = Ints((i * 31 + 7 * place) % vocab_size for place in range(1, 12))
    return Request(f"r{i}-{time.monotonic_ns()}", prompt, SamplingParams(LENGTH, seed=i), **more)


async def replies_and_logprobs(pool: EnginePool[Any], backend: TorchBackend, vocab_size: int) -> dict[str, float]:
    """Several replies at once, and their log-probs against the trainer's."""
    began = time.perf_counter()
    requests = [asked_for(i, vocab_size) for i in range(NUM)]
    replies = await asyncio.gather(*(whole(pool, request) for request in requests))
    seconds = time.perf_counter() - began
    apart: list[float] = []
    for request, (tokens, logprobs, _) in zip(requests, replies, strict=True):
        row = unsampled(Ints([*request.tokens, *tokens]), Runs.from_runs([(False, len(request.tokens)), (True, len(tokens))]))
        mine = backend.annotate(batch_of([row]), Need.OLD_LOGPROBS).old_logprobs
        assert mine is not None
        apart += [abs(one - other) for one, other in zip(mine[len(request.tokens) :].tolist(), logprobs, strict=True)]
    return {
        "tokens_per_second": len(apart) / seconds,
        "mean_logprob_difference": sum(apart) / len(apart),
        "largest_logprob_difference": max(apart),
    }


async def keeps_tokens(pool: EnginePool[Any], vocab_size: int) -> None:
    """A pause ends nothing, and an abort keeps what was sampled."""
    request = asked_for(0, vocab_size, chunk_tokens=1)
    reading = asyncio.ensure_future(whole(pool, request))
    await asyncio.sleep(0.05)
    await pool.pause()
    await pool.resume()
    tokens, _, finish = await reading
    assert len(tokens) == LENGTH and finish is Finish.LENGTH, "a reply that was paused goes on"
    request = asked_for(1, vocab_size, chunk_tokens=1)
    reading = asyncio.ensure_future(whole(pool, request))
    await asyncio.sleep(0.05)
    await pool.abort(request.id)
    tokens, _, finish = await reading
    assert finish in (Finish.ABORT, Finish.LENGTH), finish


async def whole(pool: EnginePool[Any], request: Request) -> tuple[list[int], list[float], Finish | None]:
    tokens: list[int] = []
    logprobs: list[float] = []
    finish = None
    async for chunk in pool.generate(request):
        tokens += chunk.tokens
        logprobs += chunk.logprobs
        finish = chunk.finish
    return tokens, logprobs, finish


if __name__ == "__main__":
    sys.exit(main())
