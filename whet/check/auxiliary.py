"""Models of a run in addition to its policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from whet.build.learners import auxiliary_train, parallel_key
from whet.model.scalar import ScalarModel
from whet.plan.mesh_memory import Planned
from whet.settings.rl import RunConfig
from whet.train.torch_native.config import ParallelConfig


@dataclass(frozen=True, slots=True)
class AuxiliaryModels:
    """Models without contents."""

    frozen: dict[str, Planned]
    """Models that do not train, by name. The policy's first weights are not counted as a reference here."""
    critic: ScalarModel | None = None
    batch_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    """Tokens that a reward model scores together, by the name of the model."""
    spread: frozenset[str] = frozenset()
    """The reward models that all processes of the job share."""

    def over_ranks(self, config: RunConfig) -> Iterator[tuple[str, Planned, ParallelConfig, str]]:
        """Models that several processes share, each with its degrees (its own or the policy's) and the key
        that sets them.
        """
        for name, chosen in (("reference", config.reference), ("teacher", config.teacher), ("critic", config.critic)):
            model, degrees = self.critic if name == "critic" else self.frozen.get(name), auxiliary_train(config, chosen).degrees
            if model is not None and degrees is not None:
                yield name, model, degrees, parallel_key(chosen, name)
        if config.train.degrees is not None:
            yield from ((name, self.frozen[name], config.train.degrees, "train.parallel") for name in sorted(self.spread))
