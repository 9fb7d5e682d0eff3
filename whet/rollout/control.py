"""Control of rollouts: which groups are trained on, how many are played at a time, and how old a
trained token may be."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from whet.config import Config, Reference, refuse_unread

TooOld = Literal["mask", "drop", "drop_group"]


class FilterConfig(Config):
    """One rule by which finished groups are dropped before they are trained on."""

    name: str
    """Rule: zero_std, all_right, all_wrong, length, or an import reference to a function
    (`module:function`, `file.py:function`) of a group that returns the reason to drop it, or None."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""


class ControlConfig(Config):
    """Control of rollouts: the groups to train on, the number in flight, and the age of a trained token
    (docs/rollouts.md)."""

    max_staleness: int = Field(default=0, ge=0)
    """Age of the oldest token that may be trained: the number of versions that the policy is newer than
    the version that sampled the token. 0: a rollout ends before its update begins; 1: one rollout is
    sampled while another is trained on; n: n rollouts are sampled meanwhile."""
    overlap: bool | None = None
    """Play groups while the trainer computes, so that weights change under them; unset: with
    max_staleness above 0. It needs an engine with its own copy of the weights."""
    partial: bool = False
    """Without overlap: keep the unfinished groups of a full rollout with their sampled tokens, and
    continue them under the next version, instead of aborting them. Their older tokens train within
    max_staleness."""
    too_old: TooOld = "mask"
    """Treatment of a token older than max_staleness. mask: only this token is not trained; drop: its
    whole sample is not; drop_group: no sample of its task's group is."""
    max_partial_age: int | None = Field(default=None, ge=0)
    """Restart an unfinished group that was started more than this many versions ago; none: never."""
    over_sample: float = Field(default=1.0, ge=1)
    """Without overlap: number of groups that are played for each group still missing. The surplus is
    aborted when the rollout is full, and its tasks come first in the next rollout."""
    max_groups: int | None = Field(default=None, ge=1)
    """Groups played at a time, at most; none: no limit."""
    filters: list[FilterConfig] = Field(default_factory=list)
    """Rules by which finished groups are dropped; others are played in their place (dynamic sampling)."""
    refill: bool = True
    """Play further groups in place of those that filters drop. false (without overlap): play
    over_sample times as many groups as needed and no more; if too few of them pass, the first dropped
    ones (by the start of their play) are trained on all the same."""
    give_up_after: int = Field(default=10, ge=1)
    """Stop after this many times prompts_per_rollout groups were dropped in a row."""
    order: Reference | None = None
    """Order in which finished groups are trained on: an import reference to a function that sorts them;
    none: by the start of their play."""
    retries: int = Field(default=0, ge=0)
    """Number of times that a trajectory is played again, with the same seed, if its engine, environment
    or reward failed or was too slow. Not with deterministic=true."""
    retry_budget: int | None = Field(default=None, ge=0)
    """Retries in all between two updates; none: any number."""
    rollout: Reference | None = None
    """Import reference to an async function `(ask) -> groups`, or to a class of such, that plays whole
    rollouts in place of whet's scheduler (docs/extending.md). Of the settings of this table, only
    max_staleness, overlap and too_old then count."""
    max_error_rate: float = Field(default=0.3, gt=0, le=1)
    """Stop when a greater share of the last trajectories failed; 1: never. A rollout in which every
    trajectory failed always stops the run."""
    error_window: int = Field(default=64, ge=1)
    """Number of last trajectories over which max_error_rate is counted. At least a rollout's worth is
    counted, so that a few failures in a small rollout stop nothing."""

    @property
    def overlaps(self) -> bool:
        return self.max_staleness > 0 if self.overlap is None else self.overlap

    @model_validator(mode="after")
    def _own(self) -> ControlConfig:
        if self.rollout is not None:
            others = [name for name in ControlConfig.model_fields if name not in ("rollout", "max_staleness", "overlap", "too_old")]
            refuse_unread(self, others, f"with rollout={self.rollout!r}, which plays whole rollouts", "see to it in there")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> ControlConfig:
        if self.overlaps and self.max_staleness == 0:
            raise ValueError(
                "control.overlap is true with max_staleness=0: what is sampled while the trainer computes is one version old when it is "
                "trained on; set max_staleness=1 or more, or overlap=false"
            )
        if self.overlaps and self.partial:
            raise ValueError("control.partial has no meaning with overlap: nothing is ever cut off there; leave it out")
        if self.overlaps and self.over_sample > 1:
            raise ValueError(
                f"control.over_sample={self.over_sample} has no meaning with overlap: what is left over is trained on later; raise "
                "max_staleness to have more groups under way"
            )
        if not self.refill and (self.overlaps or self.over_sample == 1 or not self.filters):
            why = "with overlap: groups are always under way there" if self.overlaps else "without filters and over_sample above 1"
            raise ValueError(f"control.refill=false has no meaning {why}; leave it out, or change that")
        if self.retry_budget is not None and self.retries == 0:
            raise ValueError(f"control.retry_budget={self.retry_budget} bounds nothing with control.retries=0; set that, or leave it out")
        return self


def refuse_timing(config: ControlConfig) -> None:
    """Refuse what cannot have the same bits every time: it depends on how long things take.

    Raises:
        ValueError: naming the key.
    """
    for key, used in (("max_staleness", config.overlaps), ("partial", config.partial), ("retries", config.retries > 0)):
        if used:
            raise ValueError(
                f"control.{key}={getattr(config, key)} with deterministic=true: what is sampled when, and under which version, depends on "
                f"how long things take, so the bits would differ; leave control.{key} out, or set deterministic=false"
            )
