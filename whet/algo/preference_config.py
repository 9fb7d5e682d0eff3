"""Settings of the losses that learn from preference pairs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from whet.config import Config


class DpoConfig(Config):
    """The loss of a pair. h is log pi(chosen)/ref(chosen) - log pi(rejected)/ref(rejected), over the tokens that train."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: -log sigmoid(beta h - margin) (DPO); ipo: (h - 1/(2 beta))^2 (IPO, arXiv 2310.12036)."""
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Strength of the pull towards the reference: the larger, the closer the policy stays to it."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be labelled the wrong way round (conservative DPO); sigmoid only."""
    length_normalize: bool | None = None
    """Log-ratios as means over a reply's trained tokens instead of sums; unset: means for ipo, sums for sigmoid."""
    sft_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the chosen reply's negative log-likelihood per token, on top (RPO, arXiv 2404.19733, which uses 1)."""

    @model_validator(mode="after")
    def _consistent(self) -> DpoConfig:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, which ipo does not have; use loss = sigmoid, or leave it at 0")
        return self

    @property
    def means(self) -> bool:
        """True if log-ratios are means over tokens."""
        return self.loss == "ipo" if self.length_normalize is None else self.length_normalize


class RewardModelConfig(Config):
    """The loss of a pair: -log sigmoid(score(chosen) - score(rejected) - margin), of the scores at the last tokens."""

    center_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of (score(chosen) + score(rejected))^2 on top, which keeps scores around 0 (arXiv 2312.09244, which uses 0.01)."""
