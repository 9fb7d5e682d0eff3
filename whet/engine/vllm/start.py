"""vLLM's command line, and the facts that a server of it tells."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.engine.base import EngineFailed
from whet.engine.servers.http import HttpServer
from whet.engine.servers.start import ServerAddress, ServerNode, ask, command_line, reason
from whet.engine.servers.wire import Served
from whet.engine.vllm.routes import ADAPTER, GENERATE, LOAD_ADAPTER, VllmWire

SERVER = "whet_vllm.serve"
"""Runs `vllm serve`."""
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
"""Development routes are those of weight updates, and vLLM's key does not protect them: a server listens on loopback, or where the user
says that the network is private."""
KEY = "VLLM_API_KEY"
"""Environment variable with the key that a server asks for: other users can read its command line."""
OWN_ARGS = {
    "logprobs_mode": "processed_logprobs",
    "enable_scale_out": True,
    "generation_config": "vllm",
    "uvicorn_log_level": "warning",
    "weight_transfer_config": {"backend": "whet"},
    "worker_extension_cls": "whet_vllm.WorkerExtension",
}
"""Arguments without which log-probs, tokens or weights would be others than whet counts on."""
FIXED = {"model", "host", "port", "api_key", "node_rank", "master_addr", "master_port", "headless", "api_server_count", *OWN_ARGS}
NEEDED = {
    GENERATE: "start it with --enable-scale-out",
    "/pause": "start it with VLLM_SERVER_DEV_MODE=1 in its environment, reachable for trusted machines alone",
}
TAKES_ADAPTERS = {LOAD_ADAPTER: "start it with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"}
LORA_ARGS = ("enable_lora", "max_lora_rank")
"""Arguments without which vLLM takes no adapters."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values of `max_lora_rank` that vLLM knows."""
MISSING_PLUGIN = re.compile(r"No module named '?whet_vllm|Invalid weight transfer backend|whet.* is not registered")


class Vllm:
    """The `ServerKind` of vLLM's servers.

    Args:
        adapters: updates bring an adapter, and requests name it.
    """

    name, title = "vllm", "vLLM"
    own_routes = False

    def __init__(self, *, adapters: bool = False) -> None:
        self._adapters = adapters

    def command(
        self, folder: Path, at: ServerAddress, dtype: str, args: Mapping[str, Any], node: ServerNode | None = None
    ) -> list[str]:
        """As `ServerKind.command`, with a seed of its own: servers of one seed draw the same noise."""
        every = {"dtype": dtype, "seed": secrets.randbelow(2**31) if node is None else node.seed, **OWN_ARGS}
        if node is not None:
            every |= {"node_rank": node.rank, "master_addr": node.meeting.host, "master_port": node.meeting.port}
        line = command_line(self, every, FIXED, args)
        if node is not None and node.rank:
            return [SERVER, str(folder), "--headless", *line]
        return [SERVER, str(folder), "--host", at.host, "--port", str(at.port), "--api-server-count", "1", *line]

    def environment(self, at: ServerAddress, node: ServerNode | None = None) -> dict[str, str]:
        """As `ServerKind.environment`, with the `VLLM_` variables of this process, but for a key: the server's own is `at`'s."""
        passed = {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and name != KEY}
        adapters = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self._adapters else {}
        own = {} if node is None else {"VLLM_HOST_IP": node.address}
        return {**ENVIRONMENT, **adapters, **passed, **own, **({} if at.key is None else {KEY: at.key})}

    def why(self, lines: Sequence[str]) -> str:
        if MISSING_PLUGIN.search("\n".join(lines)):
            return "engine.python has no whet-vllm; name the Python of vLLM's environment, and install the package whet-vllm there"
        return reason(self, lines, "vllm")

    def connect(self, server: HttpServer, key: str | None, direct_names: frozenset[str] | None) -> VllmWire:
        name, url = server.name, server.url
        self._check_routes(server, key, NEEDED | (TAKES_ADAPTERS if self._adapters else {}))
        max_tokens, model = self._model(server, key)
        world_size = int(ask(name, url + "/get_world_size", key)["world_size"])
        receivers = tuple(f"{url} rank {rank}" for rank in range(world_size))
        label = str(ask(name, url + "/weight_info", key)["weight_version"])
        served = Served(max_tokens, receivers, label, takes_adapters=self._adapters)
        model = ADAPTER if self._adapters else model
        return VllmWire(server, served, model, has_plugin=has_plugin(url, key), direct_names=direct_names)

    def connect_fixed(self, server: HttpServer, key: str | None) -> VllmWire:
        self._check_routes(server, key, {GENERATE: NEEDED[GENERATE]})
        max_tokens, model = self._model(server, key)
        return VllmWire(server, Served(max_tokens, (), label=""), model, has_plugin=False, direct_names=None)

    def _check_routes(self, server: HttpServer, key: str | None, needed: Mapping[str, str]) -> None:
        paths = ask(server.name, server.url + "/openapi.json", key).get("paths", {})
        for route, remedy in needed.items():
            if route not in paths:
                raise EngineFailed(f"{server.name}: the server at {server.url} has no route {route}; {remedy}")

    def _model(self, server: HttpServer, key: str | None) -> tuple[int, str]:
        """Longest sequence and name of the model."""
        models = ask(server.name, server.url + "/v1/models", key).get("data") or [{}]
        return int(models[0].get("max_model_len") or 0), str(models[0].get("id"))


def has_plugin(url: str, key: str | None) -> bool:
    """True if every process of the server takes tickets: it was started with `whet-vllm`."""
    try:
        answer = ask("", url + "/collective_rpc", key, {"method": "whet_takes_tickets"})
    except EngineFailed:  # no such method
        return False
    return all(answer.get("results") or [False])
