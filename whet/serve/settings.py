"""The settings of `whet serve`."""

from __future__ import annotations

from pydantic import Field, model_validator

from whet.config import Config
from whet.data.config import ChatConfig
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.pool.config import PoolConfig, refuse_unread_pool
from whet.model.config import ModelConfig


class ServerLimits(Config):
    """Limits of the server, for one client and for all together."""

    max_running: int = Field(default=256, ge=1)
    """Samples in the engine at a time, over all requests; more wait their turn."""
    max_waiting: int = Field(default=1024, ge=0)
    """Samples that wait for their turn; a request that would be one too many is answered 429."""
    max_samples: int = Field(default=128, ge=1)
    """Samples of one request: prompts times n."""
    max_body_bytes: int = Field(default=16 * 1024**2, ge=1024)
    """Size of a request's body; a larger one is answered 413."""
    timeout_s: float = Field(default=3600.0, gt=0, allow_inf_nan=False)
    """Seconds that a request may take, waiting included; then it is aborted and what was sampled is handed over."""
    shutdown_s: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Seconds that open requests have to finish after Ctrl-C or SIGTERM; then they are aborted and what was sampled is handed over."""


class ServedEngine(Config):
    """Which engine samples."""

    embedded: EmbeddedConfig = Field(default_factory=EmbeddedConfig)
    """The engine in the server's process; it always has its own weights."""
    pool: PoolConfig = Field(default_factory=PoolConfig)
    """Restarts, health checks and deadlines of the engine's processes, if it has its own."""

    @model_validator(mode="after")
    def _pool_is_read(self) -> ServedEngine:
        refuse_unread_pool(self.pool, self.embedded.num_processes - 1)
        return self


class ServeConfig(ChatConfig):
    """A server (`whet serve`). Its keys come from the environment: WHET_API_KEY, and WHET_ADMIN_KEY for weights and control."""

    model: ModelConfig
    """The model that is served."""
    name: str | None = Field(default=None, min_length=1)
    """Name of the model for clients; none: the path that the model was given by."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address other than this machine's own needs WHET_API_KEY."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on; 0: a free one."""
    weight_version: str = "default"
    """Version name of the initial weights, in answers."""
    parser: str = "auto"
    """Format of the model's tool calls. auto: as its chat template tells; or as for `env.parser` (docs/tool_formats.md)."""
    stream_interval: int = Field(default=1, ge=1)
    """Tokens between two events of a stream."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads for torch; unset: torch's choice."""
    limits: ServerLimits = Field(default_factory=ServerLimits)
    """Limits for clients."""
    engine: ServedEngine = Field(default_factory=ServedEngine)
    """Sampling engine."""
