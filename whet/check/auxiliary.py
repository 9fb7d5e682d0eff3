"""The models that a run has besides its policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from whet.build.learners import parallel_key, train_beside
from whet.model.scalar import ScalarModel
from whet.plan.mesh_memory import Planned
from whet.settings.rl import RunConfig
from whet.train.torch_native.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class AuxiliaryModels:
    """Models without contents."""

    frozen: dict[str, Planned]
    """By what they are called; without a reference that is the policy's first weights."""
    critic: ScalarModel | None = None
    batch_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of the reward models among them: how many tokens of what waits are scored together."""
    spread: frozenset[str] = frozenset()
    """The reward models that all processes of the job share."""

    def over_ranks(self, config: RunConfig) -> Iterator[tuple[str, Planned, ParallelConfig, str]]:
        """The models that several processes share, with their degrees, their own or the policy's, and the setting that has them."""
        for name, chosen in (("reference", config.reference), ("teacher", config.teacher), ("critic", config.critic)):
            model, degrees = self.critic if name == "critic" else self.frozen.get(name), train_beside(config, chosen).degrees
            if model is not None and degrees is not None:
                yield name, model, degrees, parallel_key(chosen, name)
        if config.train.degrees is not None:
            yield from ((name, self.frozen[name], config.train.degrees, "train.parallel") for name in sorted(self.spread))
