"""What a model makes of its hidden states: log-probs of a language model, scores of a scalar one. All else about training is the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from whet.algo.base import Need
from whet.core.batch import TokenOutputs, TrainBatch
from whet.core.logprobs import chunked_logprobs, chunked_squared_probs
from whet.model.causal import CausalModel
from whet.model.scalar import ScalarModel
from whet.train.torch_native.layout import Lines, MicroBatch, lines_of


class Head(Protocol):
    """A model's outputs in sample space."""

    computes: ClassVar[Mapping[Need, tuple[str, ...]]]
    """What it can annotate, and the columns that each fills."""

    def annotated(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the tokens masked in whose samples are to be annotated."""
        ...

    def columns(self, micro: MicroBatch, need: Need) -> tuple[Tensor, ...]:
        """The columns of something that it `computes`, without gradient. Each [T]"""
        ...

    def outputs(self, micro: MicroBatch, *, entropy_grad: bool) -> TokenOutputs:
        """What a loss sees."""
        ...


def head_of(model: CausalModel | ScalarModel, chunk_tokens: int) -> Head:
    """The head of a model.

    Args:
        model: decides the kind.
        chunk_tokens: rows of logits held at a time.
    """
    return ScalarHead(model) if isinstance(model, ScalarModel) else LanguageHead(model, chunk_tokens)


class LanguageHead:
    """Log-probs of the trained tokens; the vocabulary is only projected to where one follows."""

    computes: ClassVar[Mapping[Need, tuple[str, ...]]] = {
        need: (need.value,) for need in (Need.OLD_LOGPROBS, Need.REF_LOGPROBS, Need.TEACHER_LOGPROBS, Need.SQUARED_PROBS)
    }

    def __init__(self, model: CausalModel, chunk_tokens: int) -> None:
        self.model = model
        self._chunk_tokens = chunk_tokens

    def annotated(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def columns(self, micro: MicroBatch, need: Need) -> tuple[Tensor, ...]:
        if need is not Need.SQUARED_PROBS:
            return (self.outputs(micro, entropy_grad=False).logprobs,)
        lines, hidden = self._lines(micro)
        found = chunked_squared_probs(self.model.logits, hidden, lines.temperature, self._chunk_tokens, nucleus=lines.nucleus)
        return (lines.spread(found),)

    def outputs(self, micro: MicroBatch, *, entropy_grad: bool) -> TokenOutputs:
        lines, hidden = self._lines(micro)
        logprobs, entropy = chunked_logprobs(
            self.model.logits,
            hidden,
            lines.targets,
            lines.temperature,
            self._chunk_tokens,
            entropy_grad=entropy_grad,
            nucleus=lines.nucleus,
        )
        return TokenOutputs(lines.spread(logprobs), lines.spread(entropy))

    def _lines(self, micro: MicroBatch) -> tuple[Lines, Tensor]:
        """Where the trained tokens are predicted, and the hidden states there. [L, H]"""
        lines = lines_of(micro.part, micro.row.place)
        hidden = self.model.hidden(micro.row.tokens, micro.row.positions, micro.row.attend)
        return lines, hidden.index_select(0, lines.predictors)


class ScalarHead:
    """One number for each token, at the token and before it."""

    computes: ClassVar[Mapping[Need, tuple[str, ...]]] = {Need.VALUES: ("values", "scores"), Need.SCORES: ("scores",)}

    def __init__(self, model: ScalarModel) -> None:
        self.model = model

    def annotated(self, batch: TrainBatch) -> TrainBatch:
        """Every valid sample, whether it trains or not: the environment's tokens may be time steps of credit, too."""
        mask = batch.valid[batch.sample_of_token]
        return batch.with_(loss_mask=mask.index_fill(0, batch.starts[batch.lengths > 0], False))

    def columns(self, micro: MicroBatch, need: Need) -> tuple[Tensor, ...]:
        out = self.outputs(micro, entropy_grad=False)
        assert out.values is not None and out.scores is not None
        return (out.values, out.scores) if need is Need.VALUES else (out.scores,)

    def outputs(self, micro: MicroBatch, *, entropy_grad: bool) -> TokenOutputs:
        part, row = micro.part, micro.row
        scores = self.model.scores(self.model.hidden(row.tokens, row.positions, row.attend)).index_select(0, row.place)
        first = torch.zeros_like(part.loss_mask).index_fill(0, part.starts[part.lengths > 0], True)
        nothing = torch.zeros_like(scores)
        return TokenOutputs(nothing, nothing, values=torch.where(first, nothing, scores.roll(1)), scores=scores)
