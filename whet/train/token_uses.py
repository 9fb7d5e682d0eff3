"""Numbers of each token of a rollout from the optimizer steps that used it: the first and the last."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from whet.core.batch import TrainBatch, stretches
from whet.core.choices import Clip
from whet.train.base import TokenTerms


@dataclass(frozen=True, slots=True)
class TokenUse:
    """The numbers of one use of each token. NaN where nothing computed one."""

    terms: TokenTerms
    """[T] each. A trained token that no pass computed, since it has no gradient, has a loss of 0 and the clip code SKIPPED."""
    weights: Tensor
    """Share of the token in the loss: 1 over the global denominator. [T] float32"""


@dataclass(frozen=True, slots=True)
class TokenUses:
    """The uses of a rollout's tokens."""

    first: TokenUse
    last: TokenUse | None
    """The last of several uses, with NaN where a token had only one. None: every token was used once."""


class UseTable:
    """Puts the steps of a rollout together.

    Args:
        batch: the rollout.
    """

    def __init__(self, batch: TrainBatch) -> None:
        self._lengths = batch.lengths
        self._used = torch.zeros(batch.num_samples, dtype=torch.bool)
        self._first = torch.full((len(_ROWS), batch.num_tokens), math.nan)
        self._last: Tensor | None = None

    def add(self, samples: list[int], step: TrainBatch, computed: list[int] | None, terms: TokenTerms) -> None:
        """Add an optimizer step.

        Args:
            samples: the place of each of its samples in the rollout.
            step: the whole step, with its weights.
            computed: samples of the step that went through the passes. None: all.
            terms: what the passes found of these.
        """
        assert step.weights is not None
        table = torch.full((len(_ROWS), step.num_tokens), math.nan)
        table[_WEIGHTS] = step.weights.masked_fill(~step.loss_mask, math.nan)
        if computed is not None:
            table[_CLIP] = torch.where(step.loss_mask, float(Clip.SKIPPED), math.nan)
            table[_LOSSES] = torch.where(step.loss_mask, 0.0, math.nan)
        here = torch.arange(step.num_tokens) if computed is None else stretches(step.lengths, torch.tensor(computed))
        for row, name in enumerate(_TERMS):
            table[row, here] = getattr(terms, name)
        self._put(torch.tensor(samples), step.lengths, table)

    def _put(self, samples: Tensor, lengths: Tensor, table: Tensor) -> None:
        again = self._used[samples]
        of_token = torch.repeat_interleave(again, lengths)
        places = stretches(self._lengths, samples)
        self._first[:, places[~of_token]] = table[:, ~of_token]
        if bool(again.any()):
            if self._last is None:
                self._last = torch.full_like(self._first, math.nan)
            self._last[:, places[of_token]] = table[:, of_token]
        self._used[samples] = True

    def uses(self) -> TokenUses | None:
        """The uses of all tokens. None: no step was added."""
        if not bool(self._used.any()):
            return None
        return TokenUses(_use(self._first), None if self._last is None else _use(self._last))


_TERMS = tuple(field.name for field in fields(TokenTerms))
_ROWS = (*_TERMS, "weights")
_WEIGHTS, _CLIP, _LOSSES = (_ROWS.index(name) for name in ("weights", "clip", "losses"))


def _use(table: Tensor) -> TokenUse:
    return TokenUse(TokenTerms(*table[:_WEIGHTS].unbind()), table[_WEIGHTS])
