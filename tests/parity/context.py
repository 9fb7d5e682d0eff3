"""Which tokens of a sequence each context-parallel rank holds: the zigzag layout, in which causal attention costs all the same.

A sequence is padded to 2 n chunks of one size; rank r of n holds chunks r and 2 n - 1 - r.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PlaceRange = tuple[int, int]
"""From the first place on, up to the second."""


@dataclass(frozen=True, slots=True)
class ContextSlice:
    """The part of a sequence that one rank holds; places count from the sequence's start."""

    chunk_tokens: int
    """Tokens of a chunk, padding too."""
    chunks: tuple[PlaceRange, PlaceRange]
    """Places held; those past the end are padding."""
    predictors: tuple[PlaceRange, PlaceRange]
    """Places held whose output predicts a token of the response; (0, 0) if no output does."""

    @property
    def predicted(self) -> tuple[PlaceRange, PlaceRange]:
        """Places of the response tokens that they predict."""
        first, second = (span if span == (0, 0) else (span[0] + 1, span[1] + 1) for span in self.predictors)
        return first, second

    def take(self, tokens: Tensor, pad: float = 0) -> Tensor:
        """This rank's part of a sequence, padded. [2 * chunk_tokens, ...]"""
        missing = max(self.chunks[0][1], self.chunks[1][1]) - len(tokens)
        padding = torch.full((max(missing, 0), *tokens.shape[1:]), pad, dtype=tokens.dtype, device=tokens.device)
        padded = torch.cat([tokens, padding])
        return torch.cat([padded[start:stop] for start, stop in self.chunks])

    def take_response(self, column: Tensor, prompt_length: int) -> Tensor:
        """This rank's part of a column over the response tokens. [R', ...]"""
        return torch.cat([column[max(start - prompt_length, 0) : max(stop - prompt_length, 0)] for start, stop in self.predicted])


def context_slices(length: int, response_length: int, num_ranks: int) -> list[ContextSlice]:
    """Each rank's part of a sequence whose last `response_length` tokens are the response.

    Raises:
        ValueError: unless 0 < response_length < length.
    """
    if not 0 < response_length < length:
        raise ValueError(f"a sequence of {length} tokens cannot have a response of {response_length}: a prompt of one at least comes first")
    size = -(-length // (2 * num_ranks))
    first, last = length - response_length - 1, length - 1

    def predictors(span: PlaceRange) -> PlaceRange:
        start, stop = max(span[0], first), min(span[1], last)
        return (start, stop) if start < stop else (0, 0)

    out: list[ContextSlice] = []
    for rank in range(num_ranks):
        mirror = 2 * num_ranks - 1 - rank
        spans: tuple[PlaceRange, PlaceRange] = ((rank * size, (rank + 1) * size), (mirror * size, (mirror + 1) * size))
        out.append(ContextSlice(size, spans, (predictors(spans[0]), predictors(spans[1]))))
    return out
