"""Logits before anything is drawn from them: what requests change about them, and what the model alone would have said."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.engine.embedded.scheduler import Sequence

Top = tuple[tuple[int, float], ...]
"""(id, log-prob) of the most likely tokens, the first of them first."""


@dataclass(frozen=True, slots=True)
class Raw:
    """The model's own distribution at one place: temperature 1, nothing added and nothing left out."""

    logprob: float
    """Log-prob of the drawn token."""
    top: Top
    """As many as the request asked for."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Result of a step for one sequence."""

    token: int
    logprob: float
    """Log-prob under the distribution that it was drawn from."""
    nucleus: bytes
    """The token ids of that distribution, where the request asks for them."""
    raw: Raw | None
    """Log-prob and most likely tokens under the unchanged logits of the model, if the request asks for
    them."""
    failure: str | None = None
    """Why nothing could be drawn; the token means nothing then."""


def adjusted(logits: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """The logits with each sequence's bias, then its penalties, without its stop tokens while it is too short to end and without what its
    grammar does not let follow.

    Args:
        logits: [B, V], not written to; the rows that ask for nothing stay as they are, bit for bit.
        sequences: whose next token each row is about. [B]
    """
    asking = [i for i, sequence in enumerate(sequences) if _asks(sequence)]
    if not asking:
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    for i in asking:
        _adjust(logits[i], sequences[i])
    return logits


def raw_of(logits: Tensor, sequences: Seq[Sequence], tokens: Seq[int]) -> list[Raw | None]:
    """Log-probs of `tokens` [B] under the unchanged `logits` [B, V], for the sequences that ask for
    them."""
    out: list[Raw | None] = [None] * len(sequences)
    asking = [i for i, sequence in enumerate(sequences) if sequence.wants_raw]
    if asking:
        table = torch.log_softmax(logits[asking].to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
        for row, i in zip(table, asking, strict=True):
            (top,) = most_likely(row[None], sequences[i].request.sampling.top_logprobs)
            out[i] = Raw(float(row[tokens[i]]), top)
    return out


def most_likely(logprobs: Tensor, num: int) -> list[Top]:
    """The `num` most likely tokens of each row [B, V], or as many as there are."""
    values, ids = logprobs.topk(min(num, logprobs.shape[-1]))
    return [tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]


def _asks(sequence: Sequence) -> bool:
    sampling = sequence.request.sampling
    changes = bool(sampling.logit_bias) or sampling.has_penalties or sequence.matching is not None
    return changes or sequence.num_replied < sampling.min_tokens


def _adjust(row: Tensor, sequence: Sequence) -> None:
    """One row [V], in place."""
    sampling = sequence.request.sampling
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias, strict=True)
        row[list(ids)] += row.new_tensor(biases)
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(sequence.tokens)), device=row.device)
        old = row[seen]
        row[seen] = torch.where(old > 0, old / sampling.repetition_penalty, old * sampling.repetition_penalty)
    if (sampling.presence_penalty or sampling.frequency_penalty) and sequence.num_replied:
        sampled = torch.tensor(sequence.tokens[-sequence.num_replied :], device=row.device)
        ids, counts = sampled.unique(return_counts=True)
        row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts.to(row.dtype)
    if sequence.num_replied < sampling.min_tokens and sampling.stop_token_ids:
        row[list(sampling.stop_token_ids)] = -torch.inf
    if sequence.matching is not None:
        row.masked_fill_(~sequence.matching.allowed.to(row.device), -torch.inf)
