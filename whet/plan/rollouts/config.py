"""Settings of a simulation of rollouts: sizes, and how long engines, tools, rewards and the trainer take."""

from __future__ import annotations

from pydantic import Field, model_validator

from whet.config import Config
from whet.rollout.control import ControlConfig
from whet.train.batching import BatchConfig


class EngineTimes(Config):
    """One engine (of however many GPUs). Decoding is a step for each token of all running requests together."""

    count: int = Field(default=1, ge=1)
    """Engines."""
    max_running: int = Field(default=256, ge=1)
    """Requests that one engine decodes together; others wait."""
    step_s: float = Field(default=0.01, gt=0)
    """Seconds of a decode step with no request in it (weights are read, kernels launched)."""
    step_s_per_request: float = Field(default=0.0001, ge=0)
    """Seconds more for each request in it."""
    prefill_tokens_per_s: float = Field(default=20_000, gt=0)
    """Tokens of context that one engine computes per second. Decoding waits meanwhile. After an update the context of every running
    request is computed again."""
    update_s: float = Field(default=1.0, ge=0)
    """Seconds of a weight update, in which engines sample nothing."""
    shared_slowdown: float = Field(default=0.0, ge=0)
    """Share by which engines and the controller's turns take longer while the trainer computes, if they share processors."""


class TrainerTimes(Config):
    """The trainer, all its processes together."""

    tokens_per_s: float = Field(default=50_000, gt=0)
    """Tokens of prompts and replies that forward and backward passes get through per second (and log-probs before them, if computed)."""
    step_s: float = Field(default=0.5, ge=0)
    """Seconds of an update besides: optimizer step, collectives."""
    other_s: float = Field(default=0.0, ge=0)
    """Seconds of a step in which neither is computed: batches are put together, records and metrics written."""
    driver_s_per_turn: float = Field(default=0.0005, ge=0)
    """Seconds that the controller's own work takes for each turn: one turn after the other, as it has one thread."""
    shared_slowdown: float = Field(default=0.0, ge=0)
    """Share by which the trainer takes longer while engines or the controller's turns compute too, if they share processors: 0.5 is half as
    long again."""


class ReplyTimes(Config):
    """Lengths of what the model and its tools write, and how long tools and rewards take: from a run's records, or as distributions."""

    records: str | None = None
    """A run's folder: lengths, turns, rewards and seconds of tools are drawn from its recorded trajectories, whole ones. The settings below
    then don't count, but for reward_s."""
    prompt_tokens: int = Field(default=512, ge=1)
    """Tokens of a prompt."""
    median_tokens: float = Field(default=1000, gt=0)
    """Median of a turn's sampled tokens; they are lognormal."""
    sigma: float = Field(default=0.8, ge=0)
    """Standard deviation of their logarithm: 0 for equal lengths, 1 for a long tail."""
    max_tokens: int = Field(default=8192, ge=1)
    """Most tokens of a turn."""
    turns: float = Field(default=1.0, ge=1)
    """Mean number of turns; the number of tool calls is geometric."""
    tool_s: float = Field(default=1.0, ge=0)
    """Mean seconds of a tool call; exponential."""
    tool_tokens: int = Field(default=200, ge=1)
    """Tokens of a tool's answer."""
    reward_s: float = Field(default=0.0, ge=0)
    """Seconds until a trajectory has its reward."""
    success: float = Field(default=0.5, ge=0, le=1)
    """Share of trajectories with reward 1; the others have 0. Each prompt draws its own share around it, so that groups differ."""


class SimulationConfig(Config):
    """A simulation: the real scheduler, buffer, engine pool and training loop, on a simulated clock."""

    num_rollouts: int = Field(default=12, ge=2)
    """Rollouts to simulate."""
    skip: int = Field(default=3, ge=0)
    """First rollouts that are not reported: the pipeline fills."""
    seed: int = 0
    """Seed of all lengths and times."""
    batch: BatchConfig = Field(default_factory=lambda: BatchConfig(prompts_per_rollout=64, samples_per_prompt=8))
    """As in a run."""
    control: ControlConfig = Field(default_factory=ControlConfig)
    """As in a run."""
    max_trajectory_tokens: int = Field(default=32_768, ge=2)
    """As `rollout.max_tokens`."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Most trajectories under way at a time; none: all that the groups in flight have."""
    engine: EngineTimes = Field(default_factory=EngineTimes)
    trainer: TrainerTimes = Field(default_factory=TrainerTimes)
    replies: ReplyTimes = Field(default_factory=ReplyTimes)
    grain: int = Field(default=16, ge=1)
    """Tokens that are simulated as one, for speed; lengths are rounded to it."""

    @model_validator(mode="after")
    def _sizes(self) -> SimulationConfig:
        if self.skip >= self.num_rollouts:
            raise ValueError(f"skip={self.skip} leaves none of num_rollouts={self.num_rollouts} to report")
        return self
