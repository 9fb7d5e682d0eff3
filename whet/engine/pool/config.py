"""Settings for the supervision of several engine processes."""

from __future__ import annotations

from pydantic import Field

from whet.config import Config, refuse_unread


class PoolConfig(Config):
    """Supervision of the engine's processes, if it has several (`engine.embedded.copies`,
    `tensor_parallel`), and of servers (`engine.name`)."""

    restarts: int = Field(default=3, ge=0)
    """Restarts of each member after it died or hung, or failed to restart. Ten minutes of service set
    the count back to 0. After the last restart the member is given up, and the others continue. 0:
    never restart. With `deterministic` a lost member ends the run."""
    start_timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds for a member to start: to import torch, to attach to the weights and, if it has its own
    device, to move them there."""
    health_timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds for a member to answer a health check, a call that computes nothing. After that the
    member counts as hung: it is killed and restarted."""
    step_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds that one step of a member, or one score, may take. After that the member counts as hung,
    even if it still answers health checks."""
    update_timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds for a member to take over new weights. After that the member counts as hung; the version
    rests on the receipts of the others, and the member serves again once it holds the same weights. A
    shorter `sync.timeout_s` ends the run instead. If all members take part in one exchange
    (`sync.transport=broadcast`), the shorter of the two ends the run."""


class Supervision(PoolConfig):
    """The settings, and what nobody sets."""

    restart_backoff_s: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Seconds before the first restart; twice as many before each further one."""
    health_every_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Seconds between two health checks of each member."""
    breaker_failures: int = Field(default=3, ge=1)
    """Number of failed requests in a row, by a member that lives, until its circuit breaker opens: then
    the member gets no requests."""
    breaker_open_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds until an open breaker is half-open and lets one request try; twice as many after each trial that fails, up to 32 times."""

    @classmethod
    def of(cls, config: PoolConfig) -> Supervision:
        """The supervision that settings ask for."""
        return config if isinstance(config, Supervision) else cls(**config.model_dump())


def refuse_unread_pool(pool: PoolConfig, num_apart: int) -> None:
    """Refuse settings of the pool if the engine has no process of its own (`num_apart` is 0).

    Raises:
        ValueError: if one of them is set.
    """
    if num_apart == 0:
        why = "(engine.pool) with the engine in the trainer's or server's own process"
        refuse_unread(pool, PoolConfig.model_fields, why, "set engine.embedded.copies or tensor_parallel above 1")
