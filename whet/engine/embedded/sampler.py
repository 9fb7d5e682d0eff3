"""Sampling: one uniform number per (seed, position), inverted through the distribution's cumulative sum.

A token's noise depends on nothing else, so neither batch composition nor timing changes what a request draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Heat(Protocol):
    """What the sampler reads of a request's sampling parameters."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def seed(self) -> int: ...


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Numbers in [0, 1), each a hash of (seed, position). [B]"""
    golden = np.uint64(0x9E3779B97F4A7C15)
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    place = np.array(positions, dtype=np.uint64)
    mixed = _mix(_mix(seed + golden) + (place + np.uint64(1)) * golden)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def nucleus(logprobs: Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> Tensor:
    """Log-probs renormalised over each row's top-k and top-p set; -inf outside. [B, V]

    The top-p set is the smallest set of most likely tokens whose probability reaches top_p (arXiv 1904.09751), after top-k.
    """
    vocab = logprobs.shape[-1]
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    limit = torch.tensor([k or vocab for k in top_k], device=logprobs.device)[:, None]
    ordered = ordered.masked_fill(torch.arange(vocab, device=logprobs.device)[None] >= limit, -torch.inf)
    mass = torch.softmax(ordered.double(), dim=-1)
    before = mass.cumsum(-1) - mass
    ceiling = torch.tensor(top_p, device=logprobs.device, dtype=torch.float64)[:, None]
    ordered = ordered.masked_fill((before >= ceiling) & (ceiling < 1), -torch.inf)
    kept = torch.full_like(logprobs, -torch.inf).scatter(-1, order, ordered)
    return torch.log_softmax(kept, dim=-1)


def sample(logits: Tensor, heats: Sequence[Heat], positions: Sequence[int]) -> tuple[list[int], list[float]]:
    """One token per row and its natural-log probability under the distribution that it was drawn from.

    Args:
        logits: [B, V].
        heats: each row's sampling parameters; temperature 0 takes the most likely token, with log-prob 0.
        positions: each drawn token's place in its sequence.
    """
    if logits.device.type == "mps":  # has no float64
        logits = logits.cpu()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    greedy = [h.temperature == 0 for h in heats]
    if all(greedy):
        return logits.argmax(-1).tolist(), [0.0] * len(heats)
    temperature = torch.tensor([h.temperature or 1.0 for h in heats], device=logits.device, dtype=logits.dtype)
    logprobs = torch.log_softmax(logits / temperature[:, None], dim=-1)
    if any(h.top_k or h.top_p < 1 for h in heats):
        logprobs = nucleus(logprobs, [h.top_k for h in heats], [h.top_p for h in heats])
    cumulative = logprobs.double().exp().cumsum(-1)
    drawn = torch.from_numpy(uniforms([h.seed for h in heats], positions)).to(logits.device)
    tokens = torch.searchsorted(cumulative, (drawn * cumulative[:, -1])[:, None], right=True).squeeze(-1)
    # Rounding may put the draw at the very end: take the last token that has any probability.
    last = logits.shape[-1] - 1 - (logprobs > -torch.inf).flip(-1).int().argmax(-1)
    tokens = torch.minimum(tokens, last)
    chosen = logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    if any(greedy):
        cold = torch.tensor(greedy, device=logits.device)
        tokens = torch.where(cold, logits.argmax(-1), tokens)
        chosen = torch.where(cold, torch.zeros_like(chosen), chosen)
    return tokens.tolist(), chosen.tolist()
