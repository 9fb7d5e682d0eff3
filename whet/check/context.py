"""What the checks of one configuration found so far: each one reads what those before it left here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.algo.base import Algorithm, Need
from whet.build.programs import Program, program_of
from whet.build.rollouts import TRAINING as TRAINING
from whet.check.auxiliary import AuxiliaryModels
from whet.data.preference import PreferenceSource
from whet.data.source import Source
from whet.data.supervised import SupervisedSource
from whet.data.template import Renderer
from whet.model.causal import CausalModel
from whet.model.scalar import ScalarModel
from whet.plan.memory import MemoryPlan
from whet.settings.rl import BaseRunConfig, RunConfig
from whet.settings.supervised import StepRunConfig
from whet.train.batching import BatchPlan
from whet.types import JSON, Task


@dataclass(slots=True)
class Scene:
    """A field is None until the check that finds it has."""

    config: BaseRunConfig
    calls_tools: bool = False
    """Whether environments are asked to answer and tools are called: what they do is then done."""
    batch: BatchPlan | None = None
    algorithm: Algorithm | None = None
    folder: Path | None = None
    """Of the model."""
    model: CausalModel | ScalarModel | None = None
    """On the meta device."""
    beside: AuxiliaryModels | None = None
    """The models beside the policy of a reinforcement learning run."""
    renderer: Renderer | None = None
    tools: dict[str, Sequence[Mapping[str, JSON]]] = field(default_factory=dict[str, Sequence[Mapping[str, JSON]]])
    """Schemas of an environment's tools: training's by `TRAINING`, an evaluation set's by its name."""
    rows: dict[str, Sequence[Task]] = field(default_factory=dict[str, Sequence[Task]])
    """The tasks that are played, by the same names."""
    tasks: dict[str, Task] = field(default_factory=dict[str, Task])
    """The task that an environment made of a first row, by the same names."""
    source: Source | SupervisedSource | PreferenceSource | None = None
    longest: tuple[int, ...] | None = None
    """Tokens of the longest conversation of supervised training, or of the two of the longest pair."""
    total: int | None = None
    """Rollouts of the run, or steps of supervised training."""
    memory: MemoryPlan | None = None

    @property
    def program(self) -> Program[Any]:
        """The command that trains with the configuration."""
        return program_of(self.config)

    @property
    def rl(self) -> RunConfig:
        """The configuration of a reinforcement learning run; the checks that ask for it run for no other."""
        assert isinstance(self.config, RunConfig)
        return self.config

    @property
    def steps(self) -> StepRunConfig:
        """The configuration of a run that learns from data as they are; likewise."""
        assert isinstance(self.config, StepRunConfig)
        return self.config

    @property
    def plays_greedily(self) -> bool:
        """Whether every prompt of a rollout is also played greedily, for the algorithm to compare with."""
        return self.algorithm is not None and Need.BASELINE in self.algorithm.needs

    @property
    def played_per_prompt(self) -> int:
        """Trajectories of a prompt in a rollout, the greedy one included."""
        assert self.batch is not None
        return self.batch.samples_per_prompt + self.plays_greedily

    @property
    def vocab_size(self) -> int | None:
        """Of the model's output."""
        return None if self.model is None else self.model.vocab_size
