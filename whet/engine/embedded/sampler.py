"""Sampling: one uniform number per (seed, position), inverted through the distribution's cumulative sum.

A token's noise depends on nothing else, so neither batch composition nor timing changes what a request draws.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whet.engine.embedded.compiled.library import Draw, library
from whet.types import SamplingParams

NOT_FINITE = "the model's logits are not finite: its weights are broken or training has diverged"
ONE = 2**52
"""A probability of 1 in fixed point. Running sums of fractions depend on the device's order, and CUDA has none that is deterministic."""
CANDIDATES = 1024
"""Most likely tokens that are looked at first where some are left out; 8 times as many, and so on, where those do not settle it."""

DrawnRows = tuple[list[int], list[float], list[bytes]]
"""Tokens, their log-probs, and the ids that they were drawn from where those were asked for. [B], each"""


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

    Args:
        logprobs: normalised. [B, V]
        params: each row's.
    """
    kept = torch.full_like(logprobs, -torch.inf)
    rows, width = list(range(len(params))), CANDIDATES
    while rows:
        width = min(width, logprobs.shape[-1])
        found, order, settled = _leave(logprobs[rows], [params[i] for i in rows], width)
        kept[rows] = kept[rows].scatter(-1, order, found)  # what is not settled is written again
        rows = [i for i, done in zip(rows, settled, strict=True) if not done]
        width *= 8
    return torch.log_softmax(kept, dim=-1)


def _fixed(chances: Tensor) -> Tensor:
    """Probabilities in units of 2^-52: their sums are exact, the same in any order and on any device. int64"""
    return (chances * ONE).round().to(torch.int64)


def _leave(logprobs: Tensor, params: Sequence[SamplingParams], width: int) -> tuple[Tensor, Tensor, list[bool]]:
    """The `width` most likely tokens of each row, -inf where one is left out; their ids; and for which rows no other token matters."""
    device, vocab = logprobs.device, logprobs.shape[-1]
    if width < vocab:
        ids = logprobs.topk(width, dim=-1).indices.sort(dim=-1).values
        ordered, within = logprobs.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
        order = ids.gather(-1, within)
    else:
        ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    limit = torch.tensor([p.top_k or vocab for p in params], device=device)[:, None]
    chances = ordered.double().exp().masked_fill(torch.arange(width, device=device)[None] >= limit, 0)
    whole = torch.where(limit < vocab, _fixed(chances).sum(-1, keepdim=True) / ONE, 1.0)
    mass = chances / whole
    share = _fixed(mass)
    before = share.cumsum(-1) - share
    top_p = torch.tensor([p.top_p for p in params], device=device, dtype=torch.float64)[:, None]
    floor = torch.tensor([p.min_p for p in params], device=device, dtype=torch.float64)[:, None] * mass[:, :1]
    out = (mass == 0) | (before >= _fixed(top_p).clamp(min=1)) & (top_p < 1) | (mass < floor)
    # Of tokens as likely as the last of these there may be more: which of them come first is not known here.
    sure = ((limit <= width) | (limit == vocab))[:, 0] & (out | (ordered > ordered[:, -1:])).all(-1)
    return ordered.masked_fill(out, -torch.inf), order, [True] * len(params) if width == vocab else sure.tolist()


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], *, compiled: bool = False) -> DrawnRows:
    """One token per row, its natural-log probability under the distribution that it was drawn from, and the token ids of that distribution
    (`Turn.nucleus`) where the row asks for them.

    Args:
        logits: [B, V].
        params: each row's; temperature 0 takes the most likely token (the lowest id of equals), with log-prob 0.
        positions: each drawn token's place in its sequence.
        compiled: draw in compiled code, from logits in float32 on the CPU.

    Raises:
        ValueError: if a row's logits are not finite.
        NotCompiled: if there is no compiled code.
    """
    plain = {i for i, p in enumerate(params) if compiled and p.temperature > 0 and not p.narrows}
    tokens, logprobs, kept = [0] * len(params), [0.0] * len(params), [b""] * len(params)
    for rows, way in ((sorted(plain), _sample_plain), ([i for i in range(len(params)) if i not in plain], _sample)):
        if rows:
            chosen = logits if len(rows) == len(params) else logits[rows]
            found = way(chosen, [params[i] for i in rows], [positions[i] for i in rows], compiled)
            for i, token, logprob, ids in zip(rows, *found, strict=True):
                tokens[i], logprobs[i], kept[i] = token, logprob, ids
    return tokens, logprobs, kept


def _sample_plain(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], compiled: bool) -> DrawnRows:
    """From the whole vocabulary, in compiled code."""
    noise = uniforms([p.seed for p in params], positions)
    return *_draw_compiled(logits, np.array([p.temperature for p in params]), noise), [b""] * len(params)


def _sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int], compiled: bool) -> DrawnRows:
    if logits.device.type == "mps":  # has no float64
        logits = logits.cpu()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    top, best = logits.max(dim=-1)
    if not bool(top.isfinite().all()):
        raise ValueError(NOT_FINITE)
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
        noise = uniforms([p.seed for p in rows], [positions[i] for i in warm])
        drawn, chances = _draw_compiled(filtered, np.ones(len(rows)), noise) if compiled else _draw(filtered, noise)
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
    cumulative = logprobs.double().exp().mul_(ONE).round_().to(torch.int64).cumsum_(-1)  # `_fixed` in place: rows are large
    total = cumulative[:, -1:].contiguous()
    points = (torch.from_numpy(noise).to(logprobs.device)[:, None] * total).to(torch.int64).clamp(max=total - 1)
    tokens = torch.searchsorted(cumulative, points, right=True)  # the first whose cumulative sum exceeds the point: it has probability
    return tokens.squeeze(-1).tolist(), logprobs.gather(-1, tokens).squeeze(-1).tolist()


def _draw_compiled(logits: Tensor, temperature: NDArray[np.float64], noise: NDArray[np.float64]) -> tuple[list[int], list[float]]:
    assert logits.dtype == torch.float32 and logits.is_contiguous() and logits.device.type == "cpu"
    num, vocab = logits.shape
    sums = np.empty(-(-vocab // library().draw_chunk()))
    tokens, logprobs = np.empty(num, dtype=np.int64), np.empty(num)
    arrays = [x.ctypes.data for x in (temperature, noise, sums, tokens, logprobs)]
    library().draw_tokens(ctypes.byref(Draw(num, vocab, logits.data_ptr(), *arrays)))
    if (tokens < 0).any():
        raise ValueError(NOT_FINITE)
    return tokens.tolist(), logprobs.tolist()
