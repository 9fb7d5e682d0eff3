"""Reward models from preference pairs, by Bradley and Terry: the chosen reply's score is to be above the rejected one's."""

from __future__ import annotations

from whet.algo.base import LossFunction, LossTerms
from whet.algo.preference_config import RewardModelConfig
from whet.core.batch import TokenOutputs, TrainBatch
from whet.core.preference import last_tokens, place_terms, sigmoid_loss, split_pairs
from whet.observe.metrics import Mean


def reward_model_loss(config: RewardModelConfig) -> LossFunction:
    """The loss of a batch of pairs: one term for each pair."""

    def loss(batch: TrainBatch, out: TokenOutputs) -> LossTerms:
        assert out.scores is not None and batch.margin is not None, "a reward model has a score head, and pairs have margins"
        chosen, rejected = split_pairs(batch)
        scores = out.scores[last_tokens(batch)]
        ahead = scores[chosen] - scores[rejected]
        terms = sigmoid_loss(ahead, batch.margin[chosen])
        found = {
            "rm/loss": terms.detach(),
            "rm/accuracy": (ahead.detach() > 0).float(),
            "rm/margin": ahead.detach(),
            "rm/chosen_score": scores[chosen].detach(),
            "rm/rejected_score": scores[rejected].detach(),
        }
        if config.center_coef:
            terms = terms + config.center_coef * (scores[chosen] + scores[rejected]) ** 2
        return LossTerms(place_terms(batch, terms), {name: Mean(values.sum(), len(chosen)) for name, values in found.items()})

    return loss
