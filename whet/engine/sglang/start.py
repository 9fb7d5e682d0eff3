"""SGLang's command line, and the facts that a server of it tells."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.engine.base import EngineFailed
from whet.engine.servers.http import HttpServer
from whet.engine.servers.start import LOOPBACK, ask, command_line, reason
from whet.engine.servers.wire import Served
from whet.engine.sglang.routes import SglangWire

SERVER = "sglang.launch_server"
OWN_ARGS = {"incremental_streaming_output": True}
FIXED = {"model_path", "model", "host", "port", *OWN_ARGS}


class Sglang:
    """The `ServerKind` of SGLang's servers."""

    name, title = "sglang", "SGLang"

    def command(self, folder: Path, port: int, dtype: str, args: Mapping[str, Any]) -> list[str]:
        every = {"model_path": str(folder), "host": LOOPBACK, "port": port, "dtype": dtype, "log_level": "warning", **OWN_ARGS}
        return [SERVER, *command_line(self, every, FIXED, args)]

    def environment(self) -> dict[str, str]:
        """As `ServerKind.environment`, with the `SGLANG_` variables of this process."""
        return {name: value for name, value in os.environ.items() if name.startswith(("SGLANG_", "SGL_"))}

    def why(self, lines: Sequence[str]) -> str:
        return reason(self, lines, "sglang")

    def connect(self, server: HttpServer, key: str | None, direct_names: frozenset[str] | None) -> SglangWire:
        name, url = server.name, server.url
        facts, model = ask(name, url + "/server_info", key), ask(name, url + "/model_info", key)
        models = ask(name, url + "/v1/models", key).get("data") or [{}]
        if "weight_version" not in model:
            raise EngineFailed(f"{name}: the server at {url} has no version of its weights in /model_info; take SGLang 0.5.23 or newer")
        ranks = range(int(facts.get("tp_size") or 1) * int(facts.get("pp_size") or 1) * int(facts.get("dp_size") or 1))
        served = Served(
            max_tokens=int(models[0].get("max_model_len") or 0),
            receivers=tuple(f"{url} rank {rank}" for rank in ranks),
            label=str(model["weight_version"]),
        )
        return SglangWire(server, served)

    def connect_fixed(self, server: HttpServer, key: str | None) -> SglangWire:
        return self.connect(server, key, None)
