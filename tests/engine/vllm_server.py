"""A server that speaks vLLM's wire as version 0.32 does, traps included, around a fake engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from aiohttp import web
from safetensors.torch import load_file

from tests.engine.http_member import QUICK, read_digests, score_of
from tests.fakes import FakeEngine, Script
from whet.engine.base import Capabilities
from whet.engine.pool.member import Incident, Slot
from whet.engine.pool.pool import EnginePool, breaker_of
from whet.engine.pool.weights import WeightSync
from whet.engine.servers.member import ServerMember
from whet.engine.servers.start import ServerAt
from whet.engine.vllm.start import Vllm
from whet.model.causal import CausalModel
from whet.model.config import LoraConfig
from whet.model.meta import without_contents
from whet.transport.adapter import AdapterWriter
from whet.transport.base import DiskTicket
from whet.transport.senders import adapter_sender_of, sender_of
from whet.transport.settings import SyncConfig
from whet.types import Chunk, Request, SamplingParams

HOST = "127.0.0.1"
LONGEST = 256
Handler = Callable[[web.Request], Any]
Alter = Callable[[dict[str, Any]], None]


def letters(tokens: Any) -> str:
    """A detokeniser: a letter for each token."""
    return "".join(chr(97 + token % 26) for token in tokens)


def by_length(request: Request) -> Any:
    """Tokens that depend on their place alone, so that a reply goes on as it would have, whatever the seed."""
    place = len(request.tokens)
    while True:
        token = (place * 7 + 5) % 97
        yield token, -float(token) / 10
        place += 1


class FakeVllm:
    """The server, with an event loop in a thread of its own.

    Args:
        model: of the shape of its weights.
        script: what it replies.
        plugin: it was started with whet's weight-transfer engine.
    """

    def __init__(
        self, model: CausalModel, script: Script = by_length, *, plugin: bool = True, key: str | None = None, adapters: bool = False
    ) -> None:
        self._model, self.plugin, self._key = model, plugin, key
        self.engine = FakeEngine(script, capabilities=Capabilities(LONGEST, False, False), pace_s=0.001)
        self.label = "default"
        self.bodies: list[dict[str, Any]] = []
        """Bodies of the requests."""
        self.headers: list[dict[str, str]] = []
        """Their headers."""
        self.calls: list[str] = []
        """Routes of weights and pauses, as they were called."""
        self.alter: Alter | None = None
        """Changes each event before it is sent."""
        self.statuses: list[tuple[int, str]] = []
        """Answers to the next requests, in place of tokens."""
        self.failing: dict[str, int] = {}
        """Status of routes that fail."""
        self.missing: set[str] = set() if adapters else {"/v1/load_lora_adapter"}
        """Routes that it does not have."""
        self.adapters: list[Path] = []
        """Folders of the adapters that it took."""
        self.resets = [True]
        """Whether the next resets of the prefix cache succeed; the last one stays."""
        self.checksums: dict[str, str] | None = None
        """SHA-256 of each parameter; None: it has no route that tells them."""
        self.metrics = ""
        """Text of its `/metrics`."""
        self.metrics_wait_s = 0.0
        self._digests: dict[str, str] = {}
        self._session = False
        self._loop, up = asyncio.new_event_loop(), threading.Event()
        self._ends = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve(up)), daemon=True)
        self._thread.start()
        assert up.wait(10)
        self.url = f"http://{HOST}:{self.port}"

    def die(self) -> None:
        """End in the middle of whatever it does."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _serve(self, up: threading.Event) -> None:
        app = web.Application(middlewares=[self._gate])
        routes: dict[str, Handler] = {
            "/inference/v1/generate": self._generate,
            "/inference/v1/abort_requests": self._abort,
            "/pause": self._pause,
            "/resume": self._resume,
            "/reset_prefix_cache": self._reset,
            "/collective_rpc": self._rpc,
            "/sleep": self._sleep,
            "/wake_up": self._plain,
            "/init_weight_transfer_engine": self._plain,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/update_weight_version": self._version,
            "/weight_checker": self._checker,
            "/v1/load_lora_adapter": self._adapter,
        }
        for path, handler in routes.items():
            app.router.add_post(path, handler)
        model = {"id": "tiny", "max_model_len": LONGEST}
        answers = {"/v1/models": {"data": [model]}, "/get_world_size": {"world_size": 1}}
        for path, answer in answers.items():
            app.router.add_get(path, partial(self._fact, answer))
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/weight_info", self._info)
        app.router.add_get("/openapi.json", partial(self._openapi, list(routes)))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        site = web.TCPSite(runner, HOST, 0)
        await site.start()
        self.port = runner.addresses[0][1]
        up.set()
        await self._ends.wait()
        for protocol in list(runner.server.connections if runner.server else ()):
            if protocol.transport is not None:
                protocol.transport.abort()
        await runner.cleanup()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
            await asyncio.wait({task})

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._key is not None and request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path in self.failing:
            return web.json_response({"error": {"message": "planted"}}, status=self.failing[request.path])
        self.calls.append(request.path)
        return await handler(request)

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _openapi(self, paths: list[str], _: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in paths if path not in self.missing}})

    async def _fact(self, found: Any, _: web.Request) -> web.Response:
        return web.json_response(found)

    async def _plain(self, _: web.Request) -> web.Response:
        return web.json_response({"message": "done"})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200)  # without a body, as vLLM's

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.statuses:
            status, text = self.statuses.pop(0)
            return web.json_response({"error": {"message": text, "type": "planted", "param": None, "code": status}}, status=status)
        params = body["sampling_params"]
        if "prompt_logprobs" in params:
            return await self._score(body)
        while self.engine.paused:  # as version 0.32: a new request waits without an answer
            await asyncio.sleep(0.005)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        sampling = SamplingParams(params["max_tokens"], temperature=1.0, stop_token_ids=tuple(params["stop_token_ids"]))
        asked = Request(f"generate-tokens-{body['request_id']}", tuple(body["token_ids"]), sampling, chunk_tokens=1)
        count = 0
        async with aclosing(self.engine.generate(asked)) as chunks:  # pyright: ignore[reportArgumentType]
            async for chunk in chunks:
                count += len(chunk.tokens)
                event = self._event(asked, chunk, count)
                if self.alter is not None:
                    self.alter(event)
                await answer.write(f"data: {json.dumps(event)}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def _event(self, asked: Request, chunk: Chunk, count: int) -> dict[str, Any]:
        content = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": [{"token_id": token, "logprob": logprob, "rank": 1}]}
            for token, logprob in zip(chunk.tokens, chunk.logprobs, strict=True)
        ]
        spans = None if chunk.finish is None else [{"version": self.label, "start": 0, "end": count}]
        choice = {
            "index": 0,
            "finish_reason": None if chunk.finish is None else chunk.finish.value,
            "stop_reason": None,
            "token_ids": list(chunk.tokens),
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": spans,
            "logprobs": {"content": content},
        }
        return {"request_id": asked.id, "usage": None, "output_mode": "tokens", "choices": [choice]}

    async def _score(self, body: dict[str, Any]) -> web.Response:
        tokens = tuple(body["token_ids"])
        found = score_of(self._digests, tokens).logprobs
        entries = [None, *({str(token): {"logprob": each, "rank": 1}} for token, each in zip(tokens[1:], found, strict=True))]
        choice = {"index": 0, "finish_reason": "length", "token_ids": [1]}
        return web.json_response({"choices": [choice], "prompt_logprobs": entries})

    async def _abort(self, request: web.Request) -> web.Response:
        ids = (await request.json())["request_ids"]
        for each in ids:
            await self.engine.abort(each)
        return web.json_response({"status": "aborted", "aborted": len(ids)})  # whether or not it knows them

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "abort"
        for each in list(self.engine.calls):
            await self.engine.abort(each)
        while self.engine.calls:
            await asyncio.sleep(0)
        await self.engine.pause()
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        await self.engine.resume()
        return web.json_response({"status": "resumed"})

    async def _sleep(self, _: web.Request) -> web.Response:
        for each in list(self.engine.calls):
            await self.engine.abort(each)
        return web.Response(status=200)

    async def _reset(self, _: web.Request) -> web.Response:
        return web.json_response({"success": self.resets.pop(0) if len(self.resets) > 1 else self.resets[0]})

    async def _rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        match body["method"]:
            case "whet_takes_tickets" if self.plugin:
                return web.json_response({"results": [True]})
            case "whet_digests" if self.plugin:
                return web.json_response({"results": [self._digests]})
            case "reload_weights":
                self._digests = read_digests(self._model, DiskTicket(0, Path(body["kwargs"]["weights_path"])))
                return web.json_response({"results": [None]})
            case other:
                return web.json_response({"error": {"message": f"no method {other}", "code": 500}}, status=500)

    async def _metrics(self, _: web.Request) -> web.Response:
        await asyncio.sleep(self.metrics_wait_s)
        return web.Response(text=self.metrics) if "/metrics" not in self.missing else web.Response(status=404)

    async def _checker(self, _: web.Request) -> web.Response:
        if self.checksums is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"checksums": self.checksums})

    async def _start(self, _: web.Request) -> web.Response:
        if self._session:
            words = "Worker failed with error 'start_weight_update called while a weight update is already active. Call finish first.'"
            return web.json_response({"error": {"message": words}}, status=500)
        self._session = True
        return web.json_response({"message": "Weight update started"})

    async def _update(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        assert self._session and self.engine.paused
        self._digests = read_digests(self._model, DiskTicket(info["version"], Path(info["folder"])))
        return web.json_response({"message": "Weights updated"})

    async def _finish(self, request: web.Request) -> web.Response:
        self.label, self._session = (await request.json())["weight_version"], False
        return web.json_response({"message": "Weight update finished"})

    async def _version(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.label})


    async def _adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "/v1/load_lora_adapter" in self.missing:
            return web.json_response({"detail": "Not Found"}, status=404)
        assert self.engine.paused and body["load_inplace"] and body["lora_name"] == "whet-adapter"
        self.adapters.append(Path(body["lora_path"]))
        self._digests = {name: repr(tensor.tolist()) for name, tensor in load_file(self.adapters[-1] / "adapter_model.safetensors").items()}
        return web.Response(text="Success: LoRA adapter 'whet-adapter' added successfully.")  # no JSON


class VllmPool(EnginePool[ServerMember]):
    """A pool of fake servers that it starts.

    Args:
        model: of the shape of the weights.
        num: of servers.
        script: what servers reply.
        plugin: they have whet's weight-transfer engine.
        lora: the adapter that they take; None: whole weights.
    """

    def __init__(
        self, model: CausalModel, num: int = 2, script: Script = by_length, *, plugin: bool = True, lora: LoraConfig | None = None
    ) -> None:
        self.servers: list[FakeVllm] = []
        self.incidents: list[Incident] = []
        bare = without_contents(model)
        names = frozenset(name for name, _ in bare.named_weights())

        def start(name: str, given_up: threading.Event) -> ServerMember:
            self.servers.append(FakeVllm(model, script, plugin=plugin, adapters=lora is not None))
            return ServerAt(Vllm(adapters=lora is not None), name, self.servers[-1].url, letters, names, 10.0)(given_up)

        nobody = threading.Event()
        starts = {f"vllm {i}": partial(start, f"vllm {i}") for i in range(num)}
        slots = [Slot(name, begin, begin(nobody), breaker_of(QUICK)) for name, begin in starts.items()]
        sync, where = SyncConfig(transport="disk"), Path(mkdtemp(prefix="whet-vllm-"))
        if lora is None:
            weights = WeightSync(sender_of(sync, bare, where, HOST), dict(bare.named_weights()))
        else:
            weights = WeightSync(adapter_sender_of(sync, where, AdapterWriter(bare, lora, Path("base"))), {})
        super().__init__(slots, weights, QUICK, deterministic=False, on_incident=self.incidents.append)

    def end(self) -> None:
        super().end()
        for server in self.servers:
            server.die()
