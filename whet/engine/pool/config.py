"""How a pool of engines is looked after."""

from __future__ import annotations

from pydantic import Field

from whet.config import Config, refuse_unread


class PoolConfig(Config):
    """How the engine's processes are looked after, where there are several: `engine.embedded.copies`, `tensor_parallel`."""

    restarts: int = Field(default=3, ge=0)
    """Times that each member is started again after it died or hung, or could not be started again; one that served for ten minutes since
    counts anew. Then it is given up, and the others go on. 0: never. With `deterministic` a member that is lost ends the run."""
    restart_backoff_s: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Seconds before the first restart; twice as many before each further one."""
    start_timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds for a member to start: to import torch, to attach to the weights and, where it computes on a device of its own, to move
    them there."""
    health_every_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Seconds between two looks at each member."""
    health_timeout_s: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Seconds for a member to answer one: a call that computes nothing. Then it counts as hung: it is killed and started again."""
    step_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds that one step of a member, or a score, may take. Then it counts as hung, whatever it still answers."""
    update_timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    """Seconds for a member to take over new weights. Then it counts as hung; the version stands on the others' receipts, and it serves
    again once it holds the same. `sync.timeout_s`, where it is shorter, ends the run instead; so it does where all take part in one
    exchange (`sync.transport=broadcast`), whichever is shorter."""
    breaker_failures: int = Field(default=3, ge=1)
    """Requests in a row that fail with a member, though it lives, until its circuit breaker opens: then it gets none."""
    breaker_open_s: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Seconds until an open breaker is half-open and lets one request try; twice as many after each trial that fails, up to 32 times."""


def refuse_unread_pool(pool: PoolConfig, num_apart: int) -> None:
    """Raises:
    ValueError: if it is set how the engine's processes are looked after, and it has none of its own (`num_apart` is 0).
    """
    if num_apart == 0:
        why = "(engine.pool) with the engine in the trainer's or server's own process"
        refuse_unread(pool, PoolConfig.model_fields, why, "set engine.embedded.copies or tensor_parallel above 1")
