"""Outputs from a model's hidden states: log-probs of a language model, scores of a scalar one.
Everything else in training is the same for both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from whet.algo.base import Need
from whet.core.batch import TokenOutputs, TrainBatch
from whet.core.logprobs import chunked_logprobs, chunked_squared_probs, ranked_logprobs
from whet.model.causal import CausalModel
from whet.model.scalar import ScalarModel
from whet.train.torch_native.layout import Lines, MicroBatch, RowInput
from whet.train.torch_native.ranks import Ranks


class Head(Protocol):
    """A model's outputs in sample space."""

    computes: ClassVar[Mapping[Need, tuple[str, ...]]]
    """Needs that the head can annotate, and the columns that each fills."""
    projects: ClassVar[bool]
    """True if the head projects hidden states to the vocabulary: micro-batches then have `lines` for
    it."""

    def annotated(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the tokens masked in whose samples are to be annotated."""
        ...

    def columns(self, micro: MicroBatch, need: Need) -> tuple[Tensor, ...]:
        """The columns of something that it `computes`, without gradient. Each [T]"""
        ...

    def outputs(self, micro: MicroBatch, *, entropy_grad: bool, ranked: bool = False) -> TokenOutputs:
        """Outputs that a loss reads; `ranked`: with the tokens' ranks, where the head has any."""
        ...


def head_of(model: CausalModel | ScalarModel, chunk_tokens: int, ranks: Ranks) -> Head:
    """The head of a model.

    Args:
        model: decides the kind.
        chunk_tokens: rows of logits held at a time.
        ranks: ranks that the model is spread over.
    """
    return ScalarHead(model, ranks) if isinstance(model, ScalarModel) else LanguageHead(model, chunk_tokens, ranks)


class LanguageHead:
    """Log-probs of the trained tokens; the vocabulary is only projected to where one follows."""

    computes: ClassVar[Mapping[Need, tuple[str, ...]]] = {
        need: (need.value,) for need in (Need.OLD_LOGPROBS, Need.REF_LOGPROBS, Need.TEACHER_LOGPROBS, Need.SQUARED_PROBS)
    }
    projects: ClassVar[bool] = True

    def __init__(self, model: CausalModel, chunk_tokens: int, ranks: Ranks) -> None:
        self.model = model
        self._chunk_tokens = chunk_tokens
        self._ranks = ranks

    def annotated(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def columns(self, micro: MicroBatch, need: Need) -> tuple[Tensor, ...]:
        if need is not Need.SQUARED_PROBS:
            return (self.outputs(micro, entropy_grad=False).logprobs,)
        lines = micro.lines
        assert lines is not None
        own, chosen = _own(micro.row, lines)

        def compute() -> Tensor:
            hidden = self._hidden(micro.row, own)
            heat, kept, words = own.temperature, own.nucleus, self._ranks.vocabulary
            return chunked_squared_probs(self.model.logits, hidden, heat, self._chunk_tokens, nucleus=kept, vocabulary=words)

        return (lines.spread(_whole(micro.row, self._ranks.forward(compute), chosen, len(lines))),)

    def outputs(self, micro: MicroBatch, *, entropy_grad: bool, ranked: bool = False) -> TokenOutputs:
        lines = micro.lines
        assert lines is not None
        own, chosen = _own(micro.row, lines)
        measure = ranked_logprobs if ranked else chunked_logprobs

        def compute() -> tuple[Tensor, ...]:
            return measure(
                self.model.logits,
                self._hidden(micro.row, own),
                own.targets,
                own.temperature,
                self._chunk_tokens,
                entropy_grad=entropy_grad,
                nucleus=own.nucleus,
                vocabulary=self._ranks.vocabulary,
            )

        found = [lines.spread(_whole(micro.row, x, chosen, len(lines))) for x in self._ranks.forward(compute)]
        return TokenOutputs(found[0], found[1], ranks=found[2] if ranked else None)

    def _hidden(self, row: RowInput, lines: Lines) -> Tensor:
        """The hidden states that predict the lines. [L, H]"""
        return self.model.hidden(row.tokens, row.positions, row.attend).index_select(0, lines.predictors)


class ScalarHead:
    """One number for each token, at the token and before it."""

    computes: ClassVar[Mapping[Need, tuple[str, ...]]] = {Need.VALUES: ("values", "scores"), Need.SCORES: ("scores",)}
    projects: ClassVar[bool] = False

    def __init__(self, model: ScalarModel, ranks: Ranks) -> None:
        self.model = model
        self._ranks = ranks

    def annotated(self, batch: TrainBatch) -> TrainBatch:
        """Every valid sample, whether it trains or not: the environment's tokens may be time steps of credit, too."""
        mask = batch.valid[batch.sample_of_token]
        return batch.with_(loss_mask=mask.index_fill(0, batch.starts[batch.lengths > 0], False))

    def columns(self, micro: MicroBatch, need: Need) -> tuple[Tensor, ...]:
        out = self.outputs(micro, entropy_grad=False)
        assert out.values is not None and out.scores is not None
        return (out.values, out.scores) if need is Need.VALUES else (out.scores,)

    def outputs(self, micro: MicroBatch, *, entropy_grad: bool, ranked: bool = False) -> TokenOutputs:
        part, row = micro.part, micro.row
        found = self._ranks.forward(lambda: self.model.scores(self.model.hidden(row.tokens, row.positions, row.attend)))
        if row.part is not None:
            found = row.part.whole(found, row.part.places, row.part.num_tokens)
        scores = found.index_select(0, row.place)
        first = torch.zeros_like(part.loss_mask).index_fill(0, part.starts[part.lengths > 0], True)
        nothing = torch.zeros_like(scores)
        return TokenOutputs(nothing, nothing, values=torch.where(first, nothing, scores.roll(1)), scores=scores)


def _own(row: RowInput, lines: Lines) -> tuple[Lines, Tensor | None]:
    """The lines that this rank computes, by where it has their predictors, and which of all they are. None: all."""
    if row.part is None:
        return lines, None
    chosen, predictors = row.part.where(lines.predictors)
    nucleus = lines.nucleus.take(chosen) if lines.nucleus is not None else None
    targets, heat = lines.targets[chosen], lines.temperature[chosen]
    return replace(lines, predictors=predictors, targets=targets, temperature=heat, nucleus=nucleus), chosen


def _whole(row: RowInput, own: Tensor, chosen: Tensor | None, num_lines: int) -> Tensor:
    """The numbers of all lines, from those of the lines that each rank computed. [L]"""
    if row.part is None or chosen is None:
        return own
    return row.part.whole(own, chosen, num_lines)
