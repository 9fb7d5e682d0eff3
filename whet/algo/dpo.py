"""Direct preference optimization (arXiv 2305.18290) and its kin: a policy learned from pairs, without a reward model or a rollout."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from whet.algo.base import LossFunction, LossTerms
from whet.config import Config
from whet.core.batch import TokenOutputs, TrainBatch
from whet.core.preference import ipo_loss, place_terms, sample_sums, sigmoid_loss, split_pairs
from whet.observe.metrics import Mean


class DpoConfig(Config):
    """The loss of a pair. h is log pi(chosen)/ref(chosen) - log pi(rejected)/ref(rejected), over the tokens that train."""

    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    """sigmoid: -log sigmoid(beta h - margin) (DPO); ipo: (h - 1/(2 beta))^2 (IPO, arXiv 2310.12036)."""
    beta: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """How close the policy stays to the reference: the larger, the closer."""
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
        """Whether log-ratios are means over tokens."""
        return self.loss == "ipo" if self.length_normalize is None else self.length_normalize


def dpo_loss(config: DpoConfig) -> LossFunction:
    """The loss of a batch of pairs that has `ref_logprobs`: one term for each pair."""

    def loss(batch: TrainBatch, out: TokenOutputs) -> LossTerms:
        assert batch.ref_logprobs is not None and batch.margin is not None, "pairs are annotated before they train"
        chosen, rejected = split_pairs(batch)
        ratios = sample_sums(batch, out.logprobs - batch.ref_logprobs, mean=config.means)
        ahead = ratios[chosen] - ratios[rejected]
        likelihood = sample_sums(batch, out.logprobs, mean=True)[chosen]
        if config.loss == "ipo":
            terms = ipo_loss(ahead, config.beta)
        else:
            terms = sigmoid_loss(config.beta * ahead, batch.margin[chosen], config.label_smoothing)
        rewards, count = config.beta * ratios.detach(), len(chosen)
        found = {
            "dpo/loss": terms.detach(),
            "dpo/accuracy": (ahead.detach() > 0).float(),
            "dpo/margin": config.beta * ahead.detach(),
            "dpo/chosen_reward": rewards[chosen],
            "dpo/rejected_reward": rewards[rejected],
            "dpo/chosen_logprob": likelihood.detach(),
        }
        if config.sft_coef:
            terms = terms - config.sft_coef * likelihood
        return LossTerms(place_terms(batch, terms), {name: Mean(values.sum(), count) for name, values in found.items()})

    return loss
