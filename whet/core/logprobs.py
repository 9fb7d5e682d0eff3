"""Log-probs and entropies of given tokens, in chunks: a full [tokens, vocabulary] matrix is never held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from whet.core.batch import stretches

HeadFunction = Callable[[Tensor], Tensor]
"""Hidden states [C, H] to logits [C, V]."""


@dataclass(frozen=True, slots=True)
class Nucleus:
    """The token ids that each token was sampled from (top-p, top-k), one list after the other.

    A token without ids was sampled from the whole vocabulary.
    """

    ids: Tensor
    """[K] int64"""
    offsets: Tensor
    """Token t has ids[offsets[t] : offsets[t + 1]]. [C + 1] int64, on the CPU"""

    def __post_init__(self) -> None:
        if int(self.offsets[-1]) != len(self.ids):
            raise ValueError(f"the nucleus has {len(self.ids)} ids, but its offsets end at {int(self.offsets[-1])}")

    def split(self, size: int) -> list[Nucleus]:
        """Pieces of `size` tokens, the last one shorter."""
        cuts = range(0, max(len(self.offsets) - 1, 1), size)
        return [self.rows(cut, min(cut + size, len(self.offsets) - 1)) for cut in cuts]

    def take(self, chosen: Tensor) -> Nucleus:
        """Some tokens, in the order given. `chosen`: [n] int64"""
        sizes = self.offsets.diff()
        on_cpu = chosen.cpu()
        places = stretches(sizes, on_cpu).to(self.ids.device)
        return Nucleus(self.ids[places], torch.cat([sizes.new_zeros(1), sizes[on_cpu].cumsum(0)]))

    def rows(self, start: int, stop: int) -> Nucleus:
        """Tokens start to stop."""
        offsets = self.offsets[start : stop + 1]
        return Nucleus(self.ids[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])

    def excluded(self, vocab_size: int) -> Tensor:
        """True where a token could not be drawn. [C, V] bool"""
        count, device = self.offsets.diff(), self.ids.device
        out = (count > 0).to(device)[:, None].expand(-1, vocab_size).clone()
        rows = torch.repeat_interleave(torch.arange(len(count)), count).to(device)
        out[rows, self.ids] = False
        return out


def logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    *,
    entropy_grad: bool = True,
    nucleus: Nucleus | None = None,
) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each target and entropy in nats of softmax(logits / temperature).

    Args:
        logits: [C, V]; computed with in float32 at least.
        targets: [C] int64.
        temperature: [C], positive.
        entropy_grad: True if the entropy takes part in the backward pass.
        nucleus: log-probs are renormalised over these tokens, as the sampling was; a target always belongs to them. The
            entropy stays that of the whole distribution.

    Returns:
        Two [C] tensors.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    if nucleus is not None:
        excluded = nucleus.excluded(logits.shape[-1]).scatter_(1, targets[:, None], False)
        logprobs = torch.log_softmax(logits.masked_fill(excluded, -torch.inf), dim=-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def squared_probs(logits: Tensor, temperature: Tensor, nucleus: Nucleus | None = None) -> Tensor:
    """Sum over the vocabulary of softmax(logits / temperature)^2, renormalised over the nucleus. [C]

    Args:
        logits: [C, V]; computed with in float32 at least.
        temperature: [C], positive.
        nucleus: token ids that each token was sampled from.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]
    if nucleus is not None:
        logits = logits.masked_fill(nucleus.excluded(logits.shape[-1]), -torch.inf)
    return (2 * torch.log_softmax(logits, dim=-1)).exp().sum(-1)


def ranks(logits: Tensor, targets: Tensor) -> Tensor:
    """Place of each target among all logits, the largest being 1; equal ones share the first place. [C] float32, exact to 2^24

    Args:
        logits: [C, V]
        targets: [C] int64.
    """
    own = logits.gather(-1, targets[:, None])
    return 1.0 + (logits > own).sum(-1).float()


class Vocabulary(Protocol):
    """Reader of log-probs from logits: of the whole vocabulary, or of the part of it that this process
    holds."""

    def logprobs_and_entropy(
        self, logits: Tensor, targets: Tensor, temperature: Tensor, *, entropy_grad: bool = True, nucleus: Nucleus | None = None
    ) -> tuple[Tensor, Tensor]:
        """As the function of that name."""
        ...

    def squared_probs(self, logits: Tensor, temperature: Tensor, nucleus: Nucleus | None) -> Tensor:
        """As the function of that name, without gradient."""
        ...

    def ranks(self, logits: Tensor, targets: Tensor) -> Tensor:
        """As the function of that name."""
        ...


class WholeVocabulary:
    """The logits of every token."""

    logprobs_and_entropy = staticmethod(logprobs_and_entropy)
    squared_probs = staticmethod(squared_probs)
    ranks = staticmethod(ranks)


WHOLE = WholeVocabulary()


def chunked_logprobs(
    head: HeadFunction,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    chunk_tokens: int,
    *,
    entropy_grad: bool = False,
    nucleus: Nucleus | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Tensor, Tensor]:
    """`logprobs_and_entropy(head(hidden), ...)` with at most `chunk_tokens` rows of logits held at a time.

    That holds in the backward pass too: with more than one chunk, each chunk's logits are computed again there.

    Args:
        head: hidden states to logits.
        hidden: [N, H], at the positions that predict the targets.
        targets: [N] int64.
        temperature: [N].
        chunk_tokens: rows of logits held at a time.
        entropy_grad: True if the entropy takes part in the backward pass.
        nucleus: token ids that each target was sampled from, of N tokens.
        vocabulary: part of the vocabulary that the head's logits are of.
    """

    def one(rows: Tensor, wanted: Tensor, heat: Tensor, kept: Nucleus | None) -> tuple[Tensor, ...]:
        return vocabulary.logprobs_and_entropy(head(rows), wanted, heat, entropy_grad=entropy_grad, nucleus=kept)

    logprobs, entropy = _in_chunks(one, (hidden, targets, temperature), nucleus, chunk_tokens)
    return logprobs, entropy


def ranked_logprobs(
    head: HeadFunction,
    hidden: Tensor,
    targets: Tensor,
    temperature: Tensor,
    chunk_tokens: int,
    *,
    entropy_grad: bool = False,
    nucleus: Nucleus | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Tensor, Tensor, Tensor]:
    """`chunked_logprobs`, and the targets' ranks by the same logits. Three [N] tensors"""

    def one(rows: Tensor, wanted: Tensor, heat: Tensor, kept: Nucleus | None) -> tuple[Tensor, ...]:
        logits = head(rows)
        found = vocabulary.logprobs_and_entropy(logits, wanted, heat, entropy_grad=entropy_grad, nucleus=kept)
        return (*found, vocabulary.ranks(logits.detach(), wanted))

    logprobs, entropy, places = _in_chunks(one, (hidden, targets, temperature), nucleus, chunk_tokens)
    return logprobs, entropy, places


def _in_chunks(
    one: Callable[..., tuple[Tensor, ...]], columns: tuple[Tensor, Tensor, Tensor], nucleus: Nucleus | None, chunk_tokens: int
) -> list[Tensor]:
    """Outputs of `one` for each chunk of the columns, put together."""
    if len(columns[1]) <= chunk_tokens or not torch.is_grad_enabled():
        run = one
    else:
        checkpointed = cast(Any, checkpoint)

        def run(*piece: Any) -> tuple[Tensor, ...]:
            return checkpointed(one, *piece, use_reentrant=False, preserve_rng_state=False)

    pieces = [torch.split(column, chunk_tokens) for column in columns]
    kept = [None] * len(pieces[1]) if nucleus is None else nucleus.split(chunk_tokens)
    outs = [run(*piece) for piece in zip(*pieces, kept, strict=True)]
    return [torch.cat(parts) for parts in zip(*outs, strict=True)]


def chunked_squared_probs(
    head: HeadFunction,
    hidden: Tensor,
    temperature: Tensor,
    chunk_tokens: int,
    *,
    nucleus: Nucleus | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """`squared_probs(head(hidden), ...)` of each token in chunks, without gradient. [N]

    Args:
        head: hidden states to logits.
        hidden: [N, H], at the positions that predict the tokens.
        temperature: [N].
        chunk_tokens: rows of logits held at a time.
        nucleus: token ids that each token was sampled from: the probabilities are renormalised over it.
        vocabulary: part of the vocabulary that the head's logits are of.
    """
    sums: list[Tensor] = []
    columns = [torch.split(column, chunk_tokens) for column in (hidden, temperature)]
    pieces = [None] * len(columns[1]) if nucleus is None else nucleus.split(chunk_tokens)
    with torch.no_grad():
        for rows, heat, kept in zip(*columns, pieces, strict=True):
            sums.append(vocabulary.squared_probs(head(rows), heat, kept))
    return torch.cat(sums)
