"""Settings of the off-policy correction between engine and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import Field, model_validator

from whet.algo.correction_presets import PRESETS, Preset, PresetName
from whet.config import Config, refuse_unread
from whet.core.choices import Bound, Correction, Level, Rejection, Statistic


class RejectionConfig(Config):
    """Tokens are kept where a statistic of log pi_rollout / pi_train is within bounds."""

    statistic: Statistic
    """token_, sum_, mean_ or max_ (over a sample), of k1, k2 or k3."""
    high: float = Field(gt=0)
    """Largest value; for k1 the largest ratio pi_rollout / pi_train."""
    low: float | None = Field(default=None, gt=0)
    """For k1 the smallest ratio; unset: 1 / high."""


class CorrectionConfig(Config):
    """Importance weights of the trainer's policy over the engine's, and rules of rejection."""

    preset: PresetName | None = None
    """One of verl's named presets; settings given here override it."""
    weights: Level | None = None
    """Level of the ratio that weighs a token: the token's own (token), the product over its sample
    (sequence), or the geometric mean over its sample (geometric); unset: no weights."""
    bound: Bound = "truncate"
    """Treatment of ratios outside [low, high]. truncate: at most high; clip: into the bounds; icepop:
    weight 0; mask: rejected."""
    high: float = Field(default=2.0, gt=0)
    """Upper bound of a weight."""
    low: float | None = Field(default=None, ge=0)
    """Lower bound; unset: 1 / high."""
    normalize: bool = False
    """Divide weights by their mean over the step's trained tokens (which with rejected=mask are the kept ones)."""
    reject: list[RejectionConfig] = Field(default_factory=list[RejectionConfig])
    """Rules of rejection. A token trains if every rule keeps it."""
    veto: float | None = Field(default=None, gt=0)
    """Reject every token of a sample in which some token's ratio pi_train / pi_rollout is below this."""
    rejected: Literal["weigh", "mask"] = "weigh"
    """weigh: a rejected token has weight 0 and still counts in denominators (slime); mask: it is masked before credit is
    assigned, as if it had not been sampled (verl)."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data  # pydantic says what is wrong with it
        given = cast("Mapping[str, Any]", data)
        preset = next((preset for name, preset in PRESETS.items() if name == given.get("preset")), None)
        return given if preset is None else {**preset.settings, **given}

    @model_validator(mode="after")
    def _consistent(self) -> CorrectionConfig:
        if self.weights is not None:
            Correction(self.weights, self.bound, self.high, self.low)
        for criterion in self.reject:
            Rejection(criterion.statistic, criterion.high, criterion.low)
        if self.normalize and self.weights in (None, "geometric"):
            raise ValueError("normalize divides weights of the token or the sequence level by their mean; set weights to one of these")
        if self.weights is None:
            refuse_unread(self, ["bound", "high", "low"], "without weights, which it bounds", "set weights")
        elif self.bound == "truncate":
            refuse_unread(self, ["low"], "with bound=truncate, which has no lower bound", "set bound to clip, icepop or mask")
        if not self.rejects:
            refuse_unread(self, ["rejected"], "where nothing is rejected", "set reject, veto or bound=mask")
        return self

    @property
    def named(self) -> Preset:
        """The preset; one of no settings where none is named."""
        return PRESETS["disabled" if self.preset is None else self.preset]

    @property
    def rejects(self) -> bool:
        return bool(self.reject) or self.veto is not None or (self.weights is not None and self.bound == "mask")

    @property
    def used(self) -> bool:
        return self.weights is not None or self.rejects
