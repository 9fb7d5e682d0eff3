"""Log-probs and entropies of given tokens, in chunks: a full [tokens, vocabulary] matrix is never held."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
"""Hidden states [C, H] to logits [C, V]."""


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each target and entropy in nats of softmax(logits / temperature).

    Args:
        logits: [C, V]; computed with in float32 at least.
        targets: [C] int64.
        temperature: [C], positive.

    Returns:
        Two [C] tensors.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def chunked_logprobs(
    head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor, chunk_tokens: int, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """`logprobs_and_entropy(head(hidden), ...)` holding at most `chunk_tokens` rows of logits at a time, backward included.

    With more than one chunk, each chunk's logits are computed again in the backward pass.

    Args:
        head: hidden states to logits.
        hidden: [N, H], at the positions that predict the targets.
        targets: [N] int64.
        temperature: [N].
        chunk_tokens: rows of logits held at a time.
        entropy_grad: whether the entropy takes part in the backward pass.
    """

    def one(rows: Tensor, wanted: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = logprobs_and_entropy(head(rows), wanted, heat)
        return logprobs, entropy if entropy_grad else entropy.detach()

    pieces = list(
        zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), temperature.split(chunk_tokens), strict=True)
    )
    if len(pieces) <= 1 or not torch.is_grad_enabled():
        outs = [one(*piece) for piece in pieces]
    else:
        outs = [checkpoint(one, *piece, use_reentrant=False) for piece in pieces]
    if not outs:
        return hidden.new_zeros(0, dtype=torch.float32), hidden.new_zeros(0, dtype=torch.float32)
    return torch.cat([lp for lp, _ in outs]), torch.cat([ent for _, ent in outs])
