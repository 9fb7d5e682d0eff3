"""Direct preference optimization (arXiv 2305.18290) and its kin: a policy learned from pairs, without a reward model or a rollout."""

from __future__ import annotations

from whet.algo.base import LossFunction, LossTerms
from whet.algo.preference_config import DpoConfig
from whet.core.batch import TokenOutputs, TrainBatch
from whet.core.preference import ipo_loss, place_terms, sample_sums, sigmoid_loss, split_pairs
from whet.observe.metrics import Mean


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
