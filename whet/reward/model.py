"""Options of the reward `model` and who scores for it, apart from what needs torch: workers that run plain functions start without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from pydantic import Field, model_validator

from whet.config import Config, refuse_unread


class ModelRewardOptions(Config):
    """Options of the reward `model`."""

    path: str
    """A folder or a name on the hub: a model for sequence classification with one label, such as `whet rm` writes."""
    reads: Literal["auto", "tokens", "messages"] = "auto"
    """tokens: the policy's own, which asks for the policy's vocabulary; messages: they go through the reward model's own chat template, for
    conversations of one turn; auto: tokens where the two vocabularies are the same."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of parameters and computation."""
    device: str = "auto"
    """auto picks cuda, then mps, then cpu."""
    spread: bool = False
    """In a run of several processes: over all of them, as `train.parallel` spreads the policy, instead of whole in the first one. What it
    scores waits while they do something else together."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""
    batch_tokens: int = Field(default=8192, ge=1)
    """Tokens that are scored together, at most (a longer reply is scored alone); in deterministic mode
    each reply is scored alone."""

    @model_validator(mode="after")
    def _where(self) -> ModelRewardOptions:
        if self.spread:
            refuse_unread(self, ["device"], "with spread=true, which takes the trainer's devices", "set spread=false")
        return self


class Scorer(Protocol):
    """A reward model."""

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest sequence; None: any."""
        ...

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The score of each sequence at its last token."""
        ...


ScorerOf = Callable[[ModelRewardOptions], Scorer | None]
"""Returns the scorer of a reward with a model; None: the reward loads its own model."""
