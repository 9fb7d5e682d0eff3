"""The settings of `whet serve`."""

from __future__ import annotations

from pydantic import Field, model_validator

from whet.config import Config
from whet.data.config import ChatConfig
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.pool.config import PoolConfig, refuse_unread_pool
from whet.model.config import ModelConfig


class Limits(Config):
    """What one client may ask of the server, and all of them together."""

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
    """The engine in the server's process; it always has weights of its own."""
    pool: PoolConfig = Field(default_factory=PoolConfig)
    """How its processes are looked after, where it has some of its own."""

    @model_validator(mode="after")
    def _pool_is_read(self) -> ServedEngine:
        refuse_unread_pool(self.pool, self.embedded.num_processes - 1)
        return self


class ServeConfig(ChatConfig):
    """A server (`whet serve`). Its keys come from the environment: WHET_API_KEY, and WHET_ADMIN_KEY for weights and control."""

    model: ModelConfig
    """What is served."""
    name: str | None = Field(default=None, min_length=1)
    """What clients call the model; none: the path that it was given by."""
    host: str = "127.0.0.1"
    """Where to listen. Anything but this machine needs WHET_API_KEY."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Where to listen; 0: a free one."""
    weight_version: str = "default"
    """What the weights that it starts with are called in answers."""
    parser: str = "hermes"
    """How the model writes tool calls: hermes (as Qwen and Hermes models do), none, or an import reference to a function."""
    stream_interval: int = Field(default=1, ge=1)
    """Tokens between two events of a stream."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads for torch; unset: torch's choice."""
    limits: Limits = Field(default_factory=Limits)
    """What clients may ask for."""
    engine: ServedEngine = Field(default_factory=ServedEngine)
    """Sampling engine."""
