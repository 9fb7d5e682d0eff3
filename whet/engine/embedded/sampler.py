"""Sampling: one uniform number per (seed, position), inverted through the distribution's cumulative sum.

A token's noise depends on nothing else, so neither batch composition nor timing changes what a request draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet.types import SamplingParams


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


def nucleus(logprobs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probs renormalised over what each row's top-k, then top-p, then min-p leave; -inf outside. [B, V]

    The top-p set is the smallest set of most likely tokens whose probability reaches top_p (arXiv 1904.09751). Min-p leaves out what is
    less likely than that fraction of the most likely token (arXiv 2407.01082). Among equally likely tokens the lower id comes first.
    """
    vocab, device = logprobs.shape[-1], logprobs.device
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    limit = torch.tensor([p.top_k or vocab for p in params], device=device)[:, None]
    ordered = ordered.masked_fill(torch.arange(vocab, device=device)[None] >= limit, -torch.inf)
    mass = torch.softmax(ordered.double(), dim=-1)
    before = mass.cumsum(-1) - mass
    ceiling = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)[:, None]
    floor = torch.tensor([p.min_p for p in params], device=device, dtype=torch.float64)[:, None] * mass[:, :1]
    ordered = ordered.masked_fill((before >= ceiling) & (ceiling < 1) | (mass < floor), -torch.inf)
    kept = torch.full_like(logprobs, -torch.inf).scatter(-1, order, ordered)
    return torch.log_softmax(kept, dim=-1)


def sample(
    logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[list[int], list[float], list[bytes]]:
    """One token per row, its natural-log probability under the distribution that it was drawn from, and the token ids of that distribution
    (`Turn.nucleus`) where the row asks for them.

    Args:
        logits: [B, V].
        params: each row's; temperature 0 takes the most likely token (the lowest id of equals), with log-prob 0.
        positions: each drawn token's place in its sequence.

    Raises:
        ValueError: if a row's logits are not finite.
    """
    if logits.device.type == "mps":  # has no float64
        logits = logits.cpu()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top, best = logits.max(dim=-1)
    if not bool(top.isfinite().all()):
        raise ValueError("the model's logits are not finite: its weights are broken or training has diverged")
    warm = [i for i, p in enumerate(params) if p.temperature > 0]
    tokens, logprobs, kept = best.tolist(), [0.0] * len(params), [b""] * len(params)
    if warm:
        rows = [params[i] for i in warm]
        temperature = torch.tensor([p.temperature for p in rows], device=logits.device, dtype=logits.dtype)
        if len(warm) < len(params):
            logits, top = logits[warm], top[warm]
        # Less the maximum first: a division by a small temperature would overflow otherwise.
        heated = torch.log_softmax((logits - top[:, None]) / temperature[:, None], dim=-1)
        filtered = _filter(heated, rows)
        drawn, chances = _draw(filtered, uniforms([p.seed for p in rows], [positions[i] for i in warm]))
        for row, i in enumerate(warm):
            tokens[i], logprobs[i] = drawn[row], chances[row]
            if params[i].nucleus and params[i].narrows:
                kept[i] = filtered[row].isfinite().nonzero().squeeze(-1).to("cpu", torch.int32).numpy().tobytes()
    return tokens, logprobs, kept


def _filter(logprobs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Restrict the rows that ask for it; the others stay as they are, bit for bit."""
    narrow = [i for i, p in enumerate(params) if p.narrows]
    if narrow:
        logprobs[narrow] = nucleus(logprobs[narrow], [params[i] for i in narrow])
    return logprobs


def _draw(logprobs: Tensor, noise: NDArray[np.float64]) -> tuple[list[int], list[float]]:
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    points = torch.from_numpy(noise).to(logprobs.device)[:, None] * total
    # The first token whose cumulative sum exceeds the point has probability; where rounding leaves none, the last that has any.
    tokens = torch.minimum(torch.searchsorted(cumulative, points, right=True), torch.searchsorted(cumulative, total))
    return tokens.squeeze(-1).tolist(), logprobs.gather(-1, tokens).squeeze(-1).tolist()
