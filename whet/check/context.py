"""Results that the checks of one configuration share: each check reads those of the checks before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.algo.base import Algorithm, Need
from whet.build.labels import TRAINING as TRAINING
from whet.build.programs import Program, program_of
from whet.check.auxiliary import AuxiliaryModels
from whet.data.preference import PreferenceSource
from whet.data.source import Source
from whet.data.supervised import SupervisedSource
from whet.data.template import Renderer
from whet.model.causal import CausalModel
from whet.model.scalar import ScalarModel
from whet.plan.memory import MemoryPlan
from whet.rollout.sampling import RolloutConfig
from whet.settings.rl import BaseRunConfig, RunConfig
from whet.settings.supervised import StepRunConfig
from whet.train.batching import BatchPlan
from whet.types import JSON, Task


@dataclass(slots=True)
class CheckContext:
    """Settings under check, and the results so far. A field is None until its check has found it."""

    config: BaseRunConfig
    calls_tools: bool = False
    """True if environments really answer and tools are really called, with all effects of that."""
    batch: BatchPlan | None = None
    algorithm: Algorithm | None = None
    folder: Path | None = None
    """Folder of the model."""
    model: CausalModel | ScalarModel | None = None
    """The policy on the meta device."""
    auxiliary: AuxiliaryModels | None = None
    """Models of a reinforcement learning run in addition to its policy."""
    renderer: Renderer | None = None
    tools: dict[str, Sequence[Mapping[str, JSON]]] = field(default_factory=dict[str, Sequence[Mapping[str, JSON]]])
    """Schemas of an environment's tools: training's by `TRAINING`, an evaluation set's by its name."""
    rows: dict[str, Sequence[Task]] = field(default_factory=dict[str, Sequence[Task]])
    """Tasks that are played, by the same names."""
    tasks: dict[str, Task] = field(default_factory=dict[str, Task])
    """Task that an environment made of a first row, by the same names."""
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
        """The configuration of a run that learns from given data; the checks that ask for it run for no
        other.
        """
        assert isinstance(self.config, StepRunConfig)
        return self.config

    @property
    def plays_greedily(self) -> bool:
        """True if every prompt is also played greedily, as the algorithm's baseline."""
        return self.algorithm is not None and Need.BASELINE in self.algorithm.needs

    @property
    def played_per_prompt(self) -> int:
        """Trajectories of a prompt in a rollout, the greedy one included."""
        assert self.batch is not None
        return self.batch.samples_per_prompt + self.plays_greedily

    def fitted(self, rollout: RolloutConfig) -> RolloutConfig:
        """Limits of trajectories, as the model's positions allow."""
        return rollout.within(None if self.model is None else self.model.max_positions)

    @property
    def vocab_size(self) -> int | None:
        """Size of the model's vocabulary; None: not known."""
        return None if self.model is None else self.model.vocab_size
