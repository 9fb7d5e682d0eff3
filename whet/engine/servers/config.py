"""Engines that are servers: `engine.name`, `engine.urls`, `engine.servers`, `[engine.vllm]` and `[engine.sglang]`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from whet.config import Config, refuse_unread
from whet.engine.servers.devices import gpus_needed, nodes_needed

MAX_RUNNING = 256
"""Requests that a server runs at a time unless its arguments say another number."""


class VllmConfig(Config):
    """vLLM servers, each a process with an engine of its own (docs/engines.md)."""

    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the servers by vLLM's own names, with underscores (`{tensor_parallel_size = 2}`); true: a switch. whet sets
    `model`, `host`, `port`, and what log-probs and weights need."""


class SglangConfig(Config):
    """SGLang servers, each a process with an engine of its own (docs/engines.md)."""

    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the servers by SGLang's own names, with underscores (`{tp_size = 2}`); true: a switch. whet sets `model_path`, `host`,
    `port`, and how replies are streamed."""


class ServersConfig(Config):
    """Servers in place of the embedded engine."""

    name: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Engine that samples: embedded, which is whet's own, or vllm or sglang, whose servers have environments of their own
    (docs/engines.md)."""
    urls: list[str] = Field(default_factory=list)
    """Servers that run already (`http://HOST:PORT`); their key is read from the environment variable WHET_ENGINE_KEY. Empty: whet starts
    them."""
    router: str | None = None
    """Address of a router before the servers of `urls`: it chooses who samples, and weights go to each server."""
    servers: int = Field(default=1, ge=1)
    """Servers that whet starts: on this machine, or, with cluster.backend=ray, on the nodes that Ray places them on."""
    python: str = "python"
    """Python of the environment that has the servers: vLLM and whet-vllm, or SGLang."""
    quantization: str | None = None
    """Format of the servers' weights, which are quantized from the trainer's as they are written: fp8 (blocks of 128 x 128), int4 (groups
    of 128, or 64 or 32), or a quantized checkpoint (folder or hub name), whose format is taken and with which servers start. Unset: the
    trainer's type."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Servers of vLLM."""
    sglang: SglangConfig = Field(default_factory=SglangConfig)
    """Servers of SGLang."""

    @property
    def num_servers(self) -> int:
        """Number of servers; 0: the engine is embedded."""
        return 0 if self.name == "embedded" else len(self.urls) or self.servers

    @property
    def takes_adapters(self) -> bool:
        """True if servers that whet starts take an adapter (LoRA) in place of whole weights."""
        return self.name == "vllm" and self.vllm.args.get("enable_lora", self.vllm.args.get("enable-lora")) is True

    @property
    def names(self) -> list[str]:
        """Name of each server, in messages and metrics."""
        return [f"{self.name} {i}" for i in range(self.num_servers)]

    @property
    def num_started(self) -> int:
        """Number of servers that whet starts."""
        return 0 if self.urls else self.num_servers

    @property
    def args(self) -> Mapping[str, JsonValue]:
        """Arguments of the servers, by the names of their kind."""
        return self.vllm.args if self.name == "vllm" else self.sglang.args

    @property
    def gpus_each(self) -> int:
        """GPUs that each of the servers that whet starts computes on, where there are any."""
        return gpus_needed(self.name, self.args) if self.num_started else 1

    @property
    def nodes_each(self) -> int:
        """Nodes that each of the servers that whet starts is on, a process on each."""
        return nodes_needed(self.name, self.args) if self.num_started else 1

    @property
    def max_running(self) -> int:
        """Requests that all servers run at a time."""
        asked = self.args.get("max_num_seqs" if self.name == "vllm" else "max_running_requests")
        return self.num_servers * int(str(asked or MAX_RUNNING))

    @model_validator(mode="after")
    def _servers_are_read(self) -> ServersConfig:
        if self.name == "embedded":
            every = ["urls", "router", "servers", "python", "quantization", "vllm", "sglang"]
            refuse_unread(self, every, "(engine) with engine.name='embedded'", "set engine.name=vllm or sglang")
            return self
        if not self.urls:
            refuse_unread(self, ["router"], "(engine) without engine.urls", "name the servers behind the router in engine.urls")
        if self.urls:
            refuse_unread(self, ["servers", "python", self.name], "(engine) with servers that run already (engine.urls)", "leave them out")
        nodes_needed(self.name, self.args)  # reads the sizes: a wrong one is an error of the settings
        other = "sglang" if self.name == "vllm" else "vllm"
        refuse_unread(self, [other], f"(engine) with engine.name={self.name!r}", "leave it out")
        return self
