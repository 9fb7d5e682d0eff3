"""The tree of settings: what every run's TOML file may hold, and that of reinforcement learning. Each part is
defined in the folder of the class that it configures.

At the end: what one part takes over from another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from whet.algo.config import COMPARES, AlgorithmConfig, GRPOConfig
from whet.algo.policy_config import check_compared
from whet.checkpoint.config import CheckpointConfig
from whet.cluster.config import ENGINE_KEYS, ClusterConfig, check_layout
from whet.config import Config, refuse_unread, validated
from whet.data.config import ChatConfig
from whet.data.long_prompts import LongPrompts
from whet.data.own import SourceName
from whet.data.rows import RowConfig
from whet.data.source import SourceConfig
from whet.engine.embedded.config import EmbeddedConfig
from whet.engine.pool.config import PoolConfig, refuse_unread_pool
from whet.engine.servers.config import ServersConfig
from whet.env.build import EnvConfig
from whet.evaluate.config import EvaluateConfig, EvaluationSetConfig
from whet.model.config import ModelConfig
from whet.observe.trackers import ObserveConfig
from whet.reward import RewardConfig
from whet.rollout.control import ControlConfig, refuse_timing
from whet.rollout.sampling import RolloutConfig, check_trainable
from whet.train.batching import BatchConfig, plan_batch
from whet.train.config import CriticConfig, ReferenceConfig, TeacherConfig
from whet.train.torch_native.config import TrainConfig
from whet.transport.settings import SyncConfig


class DataConfig(RowConfig, ChatConfig):
    """Training prompts. Evaluation sets have the same columns, except for their `rows`."""

    train: str | list[str] | None = Field(default=None, min_length=1)
    """File, folder or hub data set (owner/name:split), or a list of them; path@[a:b] takes a slice of the
    rows.
    """
    source: SourceName | None = None
    """In place of `train`: a built-in (docs/environments.md), or an import reference to a function or class `(seed, **source_options) ->
    whet.data.source.Source` (docs/extending.md).
    """
    source_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the source."""
    source_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds that each call of the source may take."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the longest prompt that is played; see `long_prompts`."""
    long_prompts: LongPrompts = "drop"
    """Treatment of longer prompts. drop: they are not played, and counted; error: the run does not start; left, middle, right: the
    beginning, the middle or the end of the prompt's longest message is cut."""
    shuffle: bool = True
    """A new order in every epoch; false: the order of the files."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.train is None) == (self.source is None):
            found = "neither is set" if self.train is None else "both are set"
            raise ValueError(f"prompts come from files (train) or from a source of your own (source), and {found}; set one of them")
        if self.source is None:
            refuse_unread(self, ["source_options", "source_timeout_s"], "without source", "name a function in source")
        else:
            why = f"with source={self.source!r}, which says by itself what comes when"
            refuse_unread(self, ["max_prompt_tokens", "long_prompts", "shuffle"], why, "see to it in there")
        if self.max_prompt_tokens is None:
            refuse_unread(self, ["long_prompts"], "without max_prompt_tokens", "set max_prompt_tokens")
        return self


class EngineConfig(ServersConfig):
    """Which engine samples."""

    embedded: EmbeddedConfig = Field(default_factory=EmbeddedConfig)
    """The engine in the trainer's process."""
    pool: PoolConfig = Field(default_factory=PoolConfig)
    """Restarts, health checks and deadlines of the engine's processes, if it has its own."""
    sleep: bool | None = None
    """Free the memory of the engine's caches, and of its own copy of the weights, while the trainer
    computes; new weights wake the engine. Unset: only if the engine has its own processes on the
    trainer's GPUs and sampling does not overlap training."""


class BaseRunConfig(Config):
    """Settings of every kind of run."""

    run_dir: str = "runs/default"
    """Folder of the run: configuration, metrics, records, checkpoints and the exported model. If the
    command line's file does not name it, it is runs/FILE-TIME, and an unfinished run of the file with
    the same settings is continued."""
    seed: int = 0
    """Seed of everything random: data order, sampling, shuffles."""
    deterministic: bool = False
    """Same bits every time, on one machine: deterministic kernels, and steps that do not depend on the
    duration of tool calls."""
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
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    """Placement of the run's processes."""

    @property
    def num_engines_apart(self) -> int:
        """Number of engine processes in addition to the trainer's."""
        return 0

    @property
    def engine_places(self) -> tuple[int, int]:
        """Number of processes and servers of the engine that a cluster places, and the GPUs that each of them computes on."""
        return 0, 1

    @property
    def auxiliary(self) -> Mapping[str, CriticConfig | ReferenceConfig | TeacherConfig | None]:
        """Settings of each model besides the policy, by the name of its table; None: the run has no such
        table.
        """
        return {}


class RunConfig(BaseRunConfig):
    """A reinforcement learning run (`whet train`), and what `whet evaluate` and `whet generate` read."""

    num_rollouts: int | None = Field(default=None, gt=0)
    """Rollouts of the run; or give num_epochs."""
    num_epochs: float | None = Field(default=None, gt=0)
    """Passes over the prompts; num_rollouts follows from it."""
    stop_after_constant_rewards: int | None = Field(default=50, gt=0)
    """Stop after this many rollouts, counted from the start of the run, in which every trajectory got
    the same reward; none: never stop for it. A run that learns from a teacher does not stop for it."""
    data: DataConfig
    """Training prompts."""
    batch: BatchConfig = Field(default_factory=BatchConfig)
    """Batch arithmetic."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Sampling and limits of a trajectory."""
    control: ControlConfig = Field(default_factory=ControlConfig)
    """Which groups are trained on, how many are under way, and how old a trained token may be."""
    env: EnvConfig = Field(default_factory=EnvConfig)
    """The environment: single turn, tools, or your own."""
    reward: RewardConfig
    """Scoring of trajectories."""
    algo: AlgorithmConfig = Field(default_factory=GRPOConfig)
    """Credit and loss."""
    critic: CriticConfig | None = None
    """The critic, for `ppo`; unset: one with default settings."""
    reference: ReferenceConfig | None = None
    """The reference, where the algorithm keeps one; unset: the policy's first weights."""
    teacher: TeacherConfig | None = None
    """The teacher, for distillation."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """Sampling engine."""
    sync: SyncConfig = Field(default_factory=SyncConfig)
    """Transfer of new weights to engines in processes of their own."""
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig)
    """Evaluation sets."""

    @model_validator(mode="after")
    def _same_bits(self) -> RunConfig:
        if self.deterministic:
            refuse_timing(self.control)
        if not self.engine.urls:  # servers that run already are where they are
            check_layout(self.cluster, overlaps=self.control.overlaps)
        return self

    @model_validator(mode="after")
    def _weights_travel(self) -> RunConfig:
        if self.engine.num_servers and self.sync.transport not in ("auto", "disk", "broadcast"):
            raise ValueError(f"sync.transport={self.sync.transport} does not reach engine.name={self.engine.name}; set disk or broadcast")
        if self.num_engines_apart == 0 and self.engine.num_servers == 0:
            why = "(sync) with the engine in the trainer's process"
            refuse_unread(self.sync, SyncConfig.model_fields, why, "set engine.embedded.copies or tensor_parallel above 1")
        return self

    @model_validator(mode="after")
    def _pool_is_read(self) -> RunConfig:
        refuse_unread_pool(self.engine.pool, self.num_engines_apart + self.engine.num_servers)
        return self

    @model_validator(mode="after")
    def _servers_stand_alone(self) -> RunConfig:
        if self.engine.num_servers:
            if self.model.config:
                raise ValueError(
                    f"model.config does not reach engine.name={self.engine.name}, whose servers read config.json themselves: change the "
                    "file in a copy of the model's folder"
                )
            unread = EmbeddedConfig.model_fields
            refuse_unread(self.engine.embedded, unread, f"(engine.embedded) with engine.name={self.engine.name!r}", "leave it out")
            if self.deterministic:
                raise ValueError(f"deterministic=true needs engine.name=embedded: engine.name={self.engine.name} promises no bits")
            if self.engine.takes_adapters and (self.train.lora is None or self.engine.quantization is not None):
                why = "there is no adapter without train.lora" if self.train.lora is None else "engine.quantization sends whole weights"
                raise ValueError(f"engine.vllm.args: enable_lora has servers take the adapter alone, and {why}: leave it out")
            if self.engine.nodes_each > 1 and not self.cluster.private_network:
                raise ValueError(
                    f"engine.{self.engine.name}.args: nnodes has each server on {self.engine.nodes_each} nodes, and its processes talk "
                    "without a key: set cluster.backend=ray, which places them, and cluster.private_network=true if trusted machines "
                    "alone reach the nodes"
                )
        if self.engine.urls:
            refuse_unread(self.cluster, ENGINE_KEYS, "(cluster) with servers that run already (engine.urls)", "leave it out")
        elif not self.engine.num_servers:
            refuse_unread(self.cluster, ["private_network"], "(cluster) with engine.name='embedded'", "set engine.name=vllm or sglang")
        return self

    @model_validator(mode="after")
    def _tells_routes(self) -> RunConfig:
        if self.train.routing_replay == "rollout" and self.engine.embedded.static_decode:
            raise ValueError(
                "train.routing_replay=rollout asks the engine for the experts of every token, which engine.embedded.static_decode does not "
                "tell: leave static_decode out"
            )
        return self

    @model_validator(mode="after")
    def _sleeps_alone(self) -> RunConfig:
        if self.engine.sleep and self.control.overlaps:
            raise ValueError(
                "engine.sleep has the engine rest while the trainer computes, but control.max_staleness and control.overlap have it sample "
                "then: leave it out, or set control.overlap=false"
            )
        return self

    @property
    def engine_sleeps(self) -> bool:
        """True if the engine frees its memory while the trainer computes."""
        if self.engine.sleep is not None:
            return self.engine.sleep
        from whet.model.causal import pick_device

        if self.engine.num_servers:
            return False
        shares_gpus = self.num_engines_apart > 0 and not self.cluster.engine_apart and pick_device(self.model.device).type == "cuda"
        return shares_gpus and not self.control.overlaps

    @property
    def num_engines_apart(self) -> int:
        """Number of engine processes in addition to the trainer's; 0: the engine runs in the trainer's
        process, or in that of its first rank."""
        if self.engine.num_servers:
            return 0
        count = self.engine.embedded.num_processes
        return count if count > 1 or self.cluster.engine_apart else 0

    @property
    def engine_places(self) -> tuple[int, int]:
        """Number of the engine's processes that a cluster places, a server's on each of its nodes, and the GPUs that each computes on."""
        nodes = self.engine.nodes_each
        return self.num_engines_apart + self.engine.num_started * nodes, self.engine.gpus_each // nodes

    @property
    def auxiliary(self) -> Mapping[str, CriticConfig | ReferenceConfig | TeacherConfig | None]:
        """Settings of each model besides the policy, by the name of its table; None: the run has no such
        table.
        """
        return {"critic": self.critic, "reference": self.reference, "teacher": self.teacher}

    @property
    def engine_sizes(self) -> EmbeddedConfig:
        """The embedded engine as training has it: while the trainer changes its weights, nobody else can
        sample from them.
        """
        sizes = self.engine.embedded
        return sizes.model_copy(update={"own_weights": True}) if self.control.overlaps else sizes


def training_rows(config: RunConfig) -> SourceConfig:
    """The training prompts' files, columns and order."""
    assert config.data.train is not None, "the run has a source of its own"
    options = config.data.model_dump(exclude={"train", "source", "source_options", "source_timeout_s", *ChatConfig.model_fields})
    return SourceConfig(path=config.data.train, seed=config.seed, **options)


def evaluation_rows(config: RunConfig, chosen: EvaluationSetConfig) -> SourceConfig:
    """An evaluation set's files and columns: what it leaves out is as in training."""
    columns = {key: getattr(config.data, key) for key in RowConfig.model_fields}
    if chosen.rows is not None:
        columns.update(chosen.rows.model_dump(exclude_unset=True))
    return SourceConfig(path=chosen.path, shuffle=False, **validated(RowConfig, columns, "data of an evaluation set").model_dump())


def evaluation_env(config: RunConfig, chosen: EvaluationSetConfig) -> EnvConfig:
    """An evaluation set's environment: what it leaves out is as in training, unless it names its own."""
    if chosen.env is None or "name" in chosen.env.model_fields_set:
        return chosen.env or config.env
    return validated(EnvConfig, {**config.env.model_dump(), **chosen.env.model_dump(exclude_unset=True)}, "env of an evaluation set")


def evaluation_reward(config: RunConfig, chosen: EvaluationSetConfig) -> RewardConfig:
    """An evaluation set's reward, scored by as many processes as training's."""
    if chosen.reward is None:
        return config.reward
    shared = config.reward.model_dump(include={"workers", "worker_memory_mb", "environment"})
    return validated(RewardConfig, {**shared, **chosen.reward.model_dump(exclude_unset=True)}, "reward of an evaluation set")


def reward_tables(config: RunConfig) -> list[RewardConfig]:
    """The rewards of a run: training's, then those that evaluation sets have of their own."""
    return [config.reward, *(evaluation_reward(config, chosen) for chosen in config.evaluate.sets.values() if chosen.reward is not None)]


def check_best(config: RunConfig) -> None:
    """Refuse a metric for `checkpoint.best` that is never measured.

    Raises:
        ValueError: with the sets that there are.
    """
    best = config.checkpoint.best
    if best is not None and not any(best.startswith(f"eval/{name}/") for name in config.evaluate.sets):
        names = ", ".join(f"eval/{name}/..." for name in config.evaluate.sets) or "there are no evaluation sets"
        raise ValueError(f"checkpoint.best is {best!r}, but only evaluations measure the weights that are saved: {names}")


def check_together(config: BaseRunConfig) -> None:
    """Refuse settings that are right by themselves, and with which together a run cannot train.

    Raises:
        ValueError: naming the setting, and what to set.
    """
    if isinstance(config, RunConfig):
        check_trainable(config.rollout)
        check_best(config)
        if config.evaluate.interval is not None and not config.evaluate.sets:
            raise ValueError(
                f"evaluate.interval is {config.evaluate.interval}, but there is nothing to evaluate on: name rows in "
                "evaluate.sets.NAME.path, or as the test of whet.train in Python, or leave it out"
            )
        plan = plan_batch(config.batch)
        if config.algo.name in COMPARES:
            check_compared(config.algo.name, plan.samples_per_prompt)
