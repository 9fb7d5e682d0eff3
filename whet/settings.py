"""The whole tree of settings: what a run's TOML file may hold. Each part is defined beside the class that it configures."""

from __future__ import annotations

from pydantic import Field

from whet.algo import AlgorithmConfig
from whet.checkpoint.store import CheckpointConfig
from whet.config import Config
from whet.core.weights import ReducerName
from whet.data.rows import RowConfig
from whet.data.supervised import SupervisedConfig
from whet.engine.embedded.engine import EmbeddedConfig
from whet.env.build import EnvConfig
from whet.evaluate.evaluation import EvaluateConfig
from whet.model.causal import ModelConfig
from whet.observe import ObserveConfig
from whet.reward import RewardConfig
from whet.rollout.collect import RolloutConfig
from whet.train.batching import BatchConfig
from whet.train.torch_native.backend import TrainConfig


class DataConfig(RowConfig):
    """Where prompts come from. See also `[data]` of evaluation sets."""

    train: str | list[str]
    """File, folder or hub data set (owner/name:split), or a list of them; path@[a:b] takes a slice of the rows."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Drop the tasks with longer prompts (they are counted)."""
    shuffle: bool = True
    """A new order in every epoch; false: the order of the files."""


class EngineConfig(Config):
    """Which engine samples."""

    embedded: EmbeddedConfig = Field(default_factory=EmbeddedConfig)
    """The engine in the trainer's process."""


class BaseRunConfig(Config):
    """What every kind of run has."""

    run_dir: str = "runs/default"
    """Folder of the run: configuration, metrics, records, checkpoints and the exported model."""
    seed: int = 0
    """Of everything random: data order, sampling, shuffles."""
    deterministic: bool = False
    """Same bits every time, on one machine: deterministic kernels, and steps that do not depend on how long tools take."""
    threads: int | None = Field(default=None, gt=0)
    """CPU threads for torch; unset: torch's choice."""
    model: ModelConfig
    """The policy."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Optimizer and token budget."""
    observe: ObserveConfig = Field(default_factory=ObserveConfig)
    """Display, trackers and records."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When to save."""


class RunConfig(BaseRunConfig):
    """A reinforcement learning run (`whet train`), and what `whet evaluate` and `whet generate` read."""

    num_rollouts: int | None = Field(default=None, gt=0)
    """Rollouts of the run; or give num_epochs."""
    num_epochs: float | None = Field(default=None, gt=0)
    """Passes over the prompts; num_rollouts follows from it."""
    stop_after_constant_rewards: int | None = Field(default=50, gt=0)
    """Stop when so many rollouts, from the run's start, gave every trajectory the same reward; none: never."""
    data: DataConfig
    """Training prompts."""
    batch: BatchConfig = Field(default_factory=BatchConfig)
    """Batch arithmetic."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Sampling and limits of a trajectory."""
    env: EnvConfig = Field(default_factory=EnvConfig)
    """The environment: single turn, tools, or your own."""
    reward: RewardConfig
    """How trajectories are scored."""
    algo: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Credit and loss."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Sampling engine."""
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    """Evaluation sets."""


class SupervisedRunConfig(BaseRunConfig):
    """A supervised run (`whet sft`)."""

    data: SupervisedConfig
    """Conversations."""
    num_steps: int | None = Field(default=None, gt=0)
    """Optimizer steps; or give num_epochs."""
    num_epochs: float | None = Field(default=None, gt=0)
    """Passes over the conversations."""
    samples_per_step: int = Field(default=32, gt=0)
    """Conversations that one optimizer step learns from."""
    reducer: ReducerName = "token_mean"
    """token_mean: every trained token counts the same; sample_mean: every conversation does."""
