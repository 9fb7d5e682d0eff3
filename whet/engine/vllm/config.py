"""Engines that are servers: `engine.name`, `engine.urls`, `engine.servers` and `[engine.vllm]`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue, model_validator

from whet.config import Config, refuse_unread


class VllmConfig(Config):
    """vLLM servers, each a process with an engine of its own (docs/engines.md)."""

    python: str = "python"
    """Python of the environment that has vLLM and whet-vllm."""
    args: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the servers by vLLM's own names, with underscores (`{tensor_parallel_size = 2}`); true: a switch. whet sets
    `model`, `host`, `port`, and what log-probs and weights need."""


class ServersConfig(Config):
    """Servers in place of the embedded engine."""

    name: Literal["embedded", "vllm"] = "embedded"
    """Engine that samples: embedded, which is whet's own, or vllm, whose servers have an environment of their own (docs/engines.md)."""
    urls: list[str] = Field(default_factory=list)
    """Servers that run already (`http://HOST:PORT`); their key is read from the environment variable WHET_ENGINE_KEY. Empty: whet starts
    them."""
    servers: int = Field(default=1, ge=1)
    """Servers that whet starts on this machine."""
    vllm: VllmConfig = Field(default_factory=VllmConfig)
    """Servers of vLLM."""

    @property
    def num_servers(self) -> int:
        """Number of servers; 0: the engine is embedded."""
        return 0 if self.name == "embedded" else len(self.urls) or self.servers

    @model_validator(mode="after")
    def _servers_are_read(self) -> ServersConfig:
        if self.name == "embedded":
            refuse_unread(self, ["urls", "servers", "vllm"], "(engine) with engine.name='embedded'", "set engine.name=vllm")
        elif self.urls:
            refuse_unread(self, ["servers", "vllm"], "(engine) with servers that run already (engine.urls)", "leave them out")
        return self
