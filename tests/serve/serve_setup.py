"""What the server's tests share: a tiny model on disk, servers that always end, and a client of plain sockets."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.fakes import FakeEngine, repeats
from whet.build.parts import build_service
from whet.data.template import Renderer, load_tokenizer
from whet.engine.base import Capabilities
from whet.quickstart.model import SmallModelConfig, make_model
from whet.serve.access import Keys
from whet.serve.server import Closing, address_of, bind, run_server
from whet.serve.service import Service
from whet.serve.settings import ServeConfig

SHAPE = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48, max_positions=512)
TEXTS = ["How many pens are 3 and 4?", "Ann has 5 apples and eats 2. How many are left?"] * 4
DEADLINE_S = 60
NO_KEYS = Keys()


def model_folder(path: Path, seed: int = 0, shape: SmallModelConfig = SHAPE) -> Path:
    """A random model with a tokenizer and a chat template; its layers weigh enough to say something else than what they read."""
    make_model(path, TEXTS, shape, seed)
    weights = load_file(path / "model.safetensors")
    louder = {name: tensor * 10 if tensor.ndim == 2 and "layers" in name else tensor for name, tensor in weights.items()}
    save_file(louder, path / "model.safetensors", {"format": "pt"})
    return path


def config_of(model: Path, **changes: Any) -> ServeConfig:
    engine = {"embedded": {"cache_tokens": 8192, "block_size": 4}}
    settings = {"model": {"path": str(model), "device": "cpu"}, "name": "tiny", "port": 0, "engine": engine}
    return ServeConfig.model_validate({**settings, **changes})


class Live:
    """A server in a thread of this process, so that a test can look into it."""

    def __init__(self, made: AbstractContextManager[Service], keys: Keys = NO_KEYS) -> None:
        self._made, self._keys = made, keys
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._failure: BaseException | None = None

    def __enter__(self) -> Live:
        self._thread.start()
        assert self._up.wait(DEADLINE_S), "the server did not start"
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.ask()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the server did not end"

    def _main(self) -> None:
        try:
            with self._made as self.service:
                asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._up.set()
            raise

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        bound = bind(self.service.config.host, self.service.config.port, self._keys)
        self.url = address_of(bound)

        def ready(closing: Closing) -> None:
            self.closing = closing
            self._up.set()

        try:
            await run_server(self.service, bound, self._keys, ready)
        finally:
            await self.service.engine.close()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(DEADLINE_S)

    def until(self, there: Callable[[], bool]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + DEADLINE_S
        while not there():
            assert time.monotonic() < deadline, "it never was"
            time.sleep(0.005)

    def connect(self) -> HTTPConnection:
        return HTTPConnection(self.url.removeprefix("http://"), timeout=DEADLINE_S)

    def send(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> tuple[int, Any]:
        """Status and parsed answer; `body` is sent as JSON unless it is bytes."""
        connection = self.connect()
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **{key.replace("_", "-"): value for key, value in headers.items()}}
        try:
            connection.request(method, path, raw, given)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        return answer.status, json.loads(text) if text[:1] in ("{", "[") else text

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        return self.send(path, None, "GET", **headers)

    def generate(self, **body: Any) -> Any:
        status, answer = self.send("/generate", body)
        assert status == 200, answer
        return answer

    @contextmanager
    def stream(self, path: str, body: Any) -> Iterator[Iterator[Any]]:
        """The events of a stream; leaving it early hangs up."""
        connection = self.connect()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        try:
            yield events_of(answer)
        finally:
            answer.close()
            connection.close()


def events_of(answer: Any) -> Iterator[Any]:
    """What server-sent events hold, to the [DONE] that must be their last."""
    for line in answer:
        data = line.decode().rstrip("\n")
        if data == "data: [DONE]":
            assert answer.read() == b"\n"
            return
        if data:
            assert data.startswith("data: "), data
            yield json.loads(data[6:])
    raise AssertionError("the stream ended without [DONE]")


def live(model: Path, keys: Keys = NO_KEYS, **changes: Any) -> Live:
    """A server over the embedded engine."""
    return Live(build_service(config_of(model, **changes)), keys)


def scheduler_of(server: Live) -> Any:
    return server.service.engine.core.scheduler  # type: ignore[attr-defined]


def is_idle(server: Live) -> bool:
    """Nothing runs or waits, in the server and in its engine."""
    scheduler, service = scheduler_of(server), server.service
    return not (scheduler.running or scheduler.waiting or service.engine._calls or service.calls.num_open or service.gate.num_running)  # type: ignore[attr-defined]


def assert_all_free(server: Live) -> None:
    """Every block of the cache is free once the shared prompts are dropped."""
    server.until(lambda: is_idle(server))
    assert server.send("/flush_cache")[0] == 200
    pool = scheduler_of(server).pool
    assert pool.num_free == pool.num_blocks and set(pool._holders) == {0}


@contextmanager
def scripted(model: Path, text: str) -> Iterator[Service]:
    """A service whose engine always says `text` and ends its turn."""
    renderer = Renderer(load_tokenizer(model))
    tokens = (*renderer.encode(text), renderer.stop_token_ids[0])
    engine = FakeEngine(repeats(tokens), version=3, capabilities=Capabilities(512, False, True))
    with ThreadPoolExecutor(1) as texts:
        yield Service(engine, renderer, config_of(model), texts, lambda folder: (), lambda grammar: None)  # type: ignore[arg-type]
