"""SGLang's command line, and the facts that a server of it tells."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from whet.engine.base import EngineFailed
from whet.engine.servers.http import HttpServer
from whet.engine.servers.start import ServerAddress, ServerNode, ask, command_line, reason
from whet.engine.servers.wire import Served
from whet.engine.sglang.routes import SglangWire

SERVER = "sglang.launch_server"
OWN_ARGS = {"incremental_streaming_output": True}
SIZES = ("tp_size", "pp_size", "dp_size")
DTYPES = {name: name for name in ("float32", "float16", "bfloat16")} | {"float": "float32", "half": "float16"}
"""Types by the names of SGLang's argument `dtype`. `auto` tells none."""
FIXED = {"model_path", "model", "host", "port", "api_key", "admin_api_key", "node_rank", "dist_init_addr", "nccl_init_addr", *OWN_ARGS}


class Sglang:
    """The `ServerKind` of SGLang's servers."""

    name, title = "sglang", "SGLang"
    own_routes = True

    def command(
        self, folder: Path, at: ServerAddress, dtype: str, args: Mapping[str, Any], node: ServerNode | None = None
    ) -> list[str]:
        """As `ServerKind.command`. SGLang reads keys from its command line alone; with both, every route asks for one."""
        keys = {} if at.key is None else {"api_key": at.key, "admin_api_key": at.key}
        every = {"model_path": str(folder), "host": at.host, "port": at.port, "dtype": dtype, "log_level": "warning", **OWN_ARGS, **keys}
        if node is not None:
            every |= {"node_rank": node.rank, "dist_init_addr": node.meeting.url.removeprefix("http://")}
        return [SERVER, *command_line(self, every, FIXED, args)]

    def environment(self, at: ServerAddress, node: ServerNode | None = None) -> dict[str, str]:
        """As `ServerKind.environment`, with the `SGLANG_` variables of this process."""
        passed = {name: value for name, value in os.environ.items() if name.startswith(("SGLANG_", "SGL_"))}
        return passed if node is None else {**passed, "SGLANG_HOST_IP": node.address}

    def why(self, lines: Sequence[str]) -> str:
        return reason(self, lines, "sglang")

    def connect(self, server: HttpServer, key: str | None, direct_names: frozenset[str] | None) -> SglangWire:
        name, url = server.name, server.url
        facts, model = ask(name, url + "/server_info", key), ask(name, url + "/model_info", key)
        models = ask(name, url + "/v1/models", key).get("data") or [{}]
        if "weight_version" not in model:
            raise EngineFailed(f"{name}: the server at {url} has no version of its weights in /model_info; take SGLang 0.5.23 or newer")
        sizes = {size: int(facts.get(size) or 1) for size in SIZES}
        served = Served(
            max_tokens=int(models[0].get("max_model_len") or 0),
            receivers=tuple(f"{url} rank {rank}" for rank in range(sizes["tp_size"])),
            label=str(model["weight_version"]),
            dtype=None if facts.get("quantization") else DTYPES.get(str(facts.get("dtype"))),
        )
        return SglangWire(server, served, no_broadcast(sizes, dp_attention=bool(facts.get("enable_dp_attention"))))

    def connect_fixed(self, server: HttpServer, key: str | None) -> SglangWire:
        return self.connect(server, key, None)


def no_broadcast(sizes: Mapping[str, int], *, dp_attention: bool) -> str:
    """The reason why SGLang cannot take a broadcast; "": it can. A process's rank in the group is that of tensor parallelism alone."""
    if sizes["pp_size"] > 1:
        return f"SGLang takes no broadcast with {sizes['pp_size']} stages of a pipeline (--pp-size): they would have the same ranks"
    if sizes["dp_size"] > 1 and not dp_attention:
        return f"SGLang takes no broadcast with {sizes['dp_size']} replicas (--dp-size) without --enable-dp-attention"
    return ""
