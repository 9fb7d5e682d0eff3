"""Log-probs and entropies of given tokens, in chunks: a full [tokens, vocabulary] matrix is never held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

Head = Callable[[Tensor], Tensor]
"""Hidden states [C, H] to logits [C, V]."""


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: Tensor, *, entropy_grad: bool = True
) -> tuple[Tensor, Tensor]:
    """Natural-log probability of each target and entropy in nats of softmax(logits / temperature).

    Args:
        logits: [C, V]; computed with in float32 at least.
        targets: [C] int64.
        temperature: [C], positive.
        entropy_grad: whether the entropy takes part in the backward pass.

    Returns:
        Two [C] tensors.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropy


def chunked_logprobs(
    head: Head, hidden: Tensor, targets: Tensor, temperature: Tensor, chunk_tokens: int, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """`logprobs_and_entropy(head(hidden), ...)` with at most `chunk_tokens` rows of logits held at a time.

    That holds in the backward pass too: with more than one chunk, each chunk's logits are computed again there.

    Args:
        head: hidden states to logits.
        hidden: [N, H], at the positions that predict the targets.
        targets: [N] int64.
        temperature: [N].
        chunk_tokens: rows of logits held at a time.
        entropy_grad: whether the entropy takes part in the backward pass.
    """

    def one(rows: Tensor, wanted: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs_and_entropy(head(rows), wanted, heat, entropy_grad=entropy_grad)

    if len(targets) <= chunk_tokens or not torch.is_grad_enabled():
        run = one
    else:
        checkpointed = cast(Any, checkpoint)

        def run(rows: Tensor, wanted: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
            return checkpointed(one, rows, wanted, heat, use_reentrant=False, preserve_rng_state=False)

    columns = (torch.split(column, chunk_tokens) for column in (hidden, targets, temperature))
    outs = [run(*piece) for piece in zip(*columns, strict=True)]
    return torch.cat([logprobs for logprobs, _ in outs]), torch.cat([entropy for _, entropy in outs])
