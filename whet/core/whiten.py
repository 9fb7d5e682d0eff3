"""Mean, variance and whitening over masked tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the masked entries; 0 where there are none. 0-dim"""
    return torch.where(mask, values, torch.zeros_like(values)).sum() / mask.sum().clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, *, unbiased: bool = True) -> Tensor:
    """Variance of the masked entries; with `unbiased`, over one less than their number. 0-dim

    A single entry has the variance 0.

    Raises:
        ValueError: if the mask has no entry.
    """
    count = int(mask.sum())
    if count == 0:
        raise ValueError("nothing trains here: the mask is empty, so there is no variance")
    squares = masked_mean((values - masked_mean(values, mask)).square(), mask)
    return squares * (count / max(count - 1, 1)) if unbiased else squares


def whiten(values: Tensor, mask: Tensor, *, shift_mean: bool = True, eps: float = 1e-8) -> Tensor:
    """(values - mean) / sqrt(var + eps) with the statistics of the masked entries, applied to all of them. [T]

    Args:
        values: [T]
        mask: tokens of the statistics. [T] bool
        shift_mean: False adds the mean again afterwards, so that only the scale changes.
        eps: keeps equal values finite.

    Raises:
        ValueError: if the mask is empty.
    """
    mean, var = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(var + eps)
    return whitened if shift_mean else whitened + mean
