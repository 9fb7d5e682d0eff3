"""A server that takes broadcasts as SGLang 0.5.23 does, with torch's own process groups, and samples nothing.

    python -m tests.engine.sglang_server MODEL_FOLDER [TENSOR_PARALLEL]

Each rank is a process with a default group of its own, as an SGLang scheduler is. A call out of order ends the server, as an assertion ends
a scheduler. Standard output has the port. `/calls` tells the calls so far, `/state` what each rank holds, `/fail` plants a fault.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from aiohttp import web
from safetensors.torch import load_file
from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous  # pyright: ignore

TIMEOUT = timedelta(seconds=60)


class Scheduler:
    """One rank: its groups, its session and its weights."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank, self.size = rank, size
        self.groups: dict[str, Any] = {}
        self.open = False
        self.fault = ""
        self.num_buckets = 0
        self.weights = load_file(folder / "model.safetensors")

    def init_weights_update_group(self, body: dict[str, Any]) -> tuple[bool, str]:
        rank, size, name = body["rank_offset"] + self.rank, body["world_size"], body["group_name"]
        try:
            store, _, _ = next(rendezvous(f"tcp://{body['master_address']}:{body['master_port']}", rank, size, timeout=TIMEOUT))
            store.set_timeout(TIMEOUT)
            place = PrefixStore(name, store)
            made, _ = _new_process_group_helper(size, rank, [], Backend(body["backend"]), place, group_name=name, timeout=TIMEOUT)
            _world.pg_group_ranks[made] = {i: i for i in range(size)}
        except Exception as error:
            return False, f"Failed to initialize custom process group: {error}."
        self.groups[name] = made
        return True, "Succeeded to initialize custom process group."

    def destroy_weights_update_group(self, body: dict[str, Any]) -> tuple[bool, str]:
        if body["group_name"] not in self.groups:
            return False, "The group to be destroyed does not exist."
        dist.destroy_process_group(self.groups.pop(body["group_name"]))
        return True, "Succeeded to destroy custom process group."

    def begin_weight_update(self, body: dict[str, Any]) -> tuple[bool, str]:
        assert not self.open, "a session is open already"
        self.open = True
        return True, "Success"

    def update_weights_from_distributed(self, body: dict[str, Any]) -> tuple[bool, str]:
        assert self.open, "no session is open"
        self.num_buckets += 1
        try:
            if self.fault == f"refuse {self.num_buckets}":
                raise RuntimeError("planted")
            if self.fault == f"die {self.num_buckets}":
                os._exit(1)
            arrived, works = [], []
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                works.append(dist.broadcast(tensor, src=0, group=self.groups[body["group_name"]], async_op=True))
                arrived.append((name, tensor))
            for work in works:
                work.wait()
            for name, tensor in arrived:
                self.weights[name].copy_(tensor)
        except Exception as error:
            return False, f"Failed to update parameter online: {error}. Please discard the whole weights."
        return True, "Succeeded to update parameter online."

    def end_weight_update(self, body: dict[str, Any]) -> tuple[bool, str]:
        assert self.open, "no session is open"
        self.open = False
        return True, "Success"

    def fail(self, body: dict[str, Any]) -> tuple[bool, str]:
        self.fault, self.num_buckets = body["fault"], 0
        return True, ""

    def state(self, body: dict[str, Any]) -> tuple[bool, Any]:
        return True, {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in self.weights.items()}

    def weights_checker(self, body: dict[str, Any]) -> tuple[bool, Any]:
        own = {name: hashlib.sha256(_bytes(tensor[self.rank :: self.size])).hexdigest()[:16] for name, tensor in self.weights.items()}
        place = {"tp_rank": self.rank, "tp_size": self.size, "pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1}
        info = {"role": "target", **place, "rank": self.rank, "size": self.size}
        return True, {"checksums": own, "per_gpu_checksum": "", "parallelism_info": [info]}


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def schedule(rank: int, size: int, port: int, folder: Path, pipe: Connection) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    scheduler = Scheduler(rank, size, folder)
    with suppress(EOFError):
        while True:
            path, body = pipe.recv()
            pipe.send(getattr(scheduler, path)(body))


class Server:
    def __init__(self, size: int, pipes: list[Connection]) -> None:
        self.size, self.pipes, self.version = size, pipes, "default"
        self.calls: list[tuple[str, Any]] = []
        self.one = asyncio.Lock()

    async def answer(self, request: web.Request) -> web.Response:
        path, body = request.path.removeprefix("/"), json.loads(await request.text() or "{}")
        self.calls.append((path, body)) if request.method == "POST" else None
        match path:
            case "server_info":
                return web.json_response({"tp_size": self.size, "dp_size": 1, "pp_size": 1, "dtype": "float32", "quantization": None})
            case "model_info":
                return web.json_response({"weight_version": self.version})
            case "v1/models":
                return web.json_response({"data": [{"max_model_len": 64}]})
            case "calls":
                return web.json_response(self.calls)
            case "update_weight_version":
                self.version = body["new_version"]
                return web.json_response({"success": True, "message": "", "new_version": self.version})
            case "health" | "flush_cache":
                return web.Response()
            case "pause_generation" | "continue_generation":
                return web.json_response({"status": "ok"})
        async with self.one:
            found = await asyncio.to_thread(self.ask, path, body)
        if path in ("state", "weights_checker"):
            return web.json_response({"success": True, "message": "Success.", "ranks": [each for _, each in found]})
        ok, words = all(each for each, _ in found), "; ".join(words for _, words in found)
        return web.json_response({"success": ok, "message": words}, status=200 if ok else 400)

    def ask(self, path: str, body: Any) -> list[tuple[bool, Any]]:
        try:
            for pipe in self.pipes:
                pipe.send((path, body))
            return [pipe.recv() for pipe in self.pipes]
        except (EOFError, OSError):
            os._exit(1)


def main() -> None:
    folder, size = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    spawn, pipes = multiprocessing.get_context("spawn"), []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for rank in range(size):
        own, theirs = spawn.Pipe()
        spawn.Process(target=schedule, args=(rank, size, port, folder, theirs), daemon=True).start()
        theirs.close()
        pipes.append(own)

    async def serve() -> None:
        server, app = Server(size, pipes), web.Application()
        app.router.add_route("*", "/{path:.*}", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await asyncio.to_thread(server.ask, "state", {})  # its ranks are there
        print(runner.addresses[0][1], flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
