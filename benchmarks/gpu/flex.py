"""Attention over a forest row beside the same samples as chains, forward and backward; compile seconds, and recompiles as lengths change.

A row has a prompt that 8 siblings share, half of the row, and their replies. On CUDA a forest row is flex_attention, on a CPU it is whet's
own products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from gpu.clock import forget, once, peak_gib, profiled, seconds
from gpu.record import Case
from whet.model.attention import PackedRow
from whet.model.forest import Segment, forest_row

SIBLINGS = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    tokens: tuple[int, ...]
    """Of rows."""
    changes: int
    """Rows of other lengths that come after."""
    heads: int
    kv_heads: int
    dim: int


SIZES = {"small": Sizes((48, 96), 2, 4, 2, 16), "full": Sizes((384, 4096, 16_384), 10, 16, 8, 128)}
TOLERANCE = 3e-2
"""Largest difference of outputs in bfloat16, by the chains' largest output."""


def cases(sizes: str, device: torch.device) -> list[Case]:
    has = SIZES[sizes]
    rows = [Case(f"{tokens} tokens", lambda tokens=tokens: beside_chains(tokens, has, device)) for tokens in has.tokens]
    return [*rows, Case("other lengths", lambda: changing(has, device))]


def beside_chains(tokens: int, has: Sizes, device: torch.device) -> Mapping[str, Any]:
    """Both kinds of rows over the same tokens: seconds, memory, and how far they are apart."""
    prompt, reply = tokens // 2, tokens // 2 // SIBLINGS
    forget(device)
    before = compiled()
    q, k, v = inputs(prompt + SIBLINGS * reply, has, device)
    build = once(lambda: forest(prompt, reply, device), device)
    row = forest(prompt, reply, device)
    work = passes(row, q, k, v)
    first = once(work, device)
    found: dict[str, Any] = {"row": type(row).__name__, "build_s": round(build, 5), "first_s": round(first, 3)}
    found |= {"seconds": round(seconds(work, device), 6), "peak_gib": peak_gib(device), "compiled": _since(before)}
    places = torch.cat([torch.cat([torch.arange(prompt), prompt + i * reply + torch.arange(reply)]) for i in range(SIBLINGS)]).to(device)
    forget(device)
    chains = PackedRow([prompt + reply] * SIBLINGS, device)
    apart = passes(chains, *(x.detach()[places].requires_grad_() for x in (q, k, v)))
    found |= {"chains_seconds": round(seconds(apart, device), 6), "chains_peak_gib": peak_gib(device)}
    with torch.no_grad():
        expected = chains(0, q[places], k[places], v[places], has.dim**-0.5)
        difference = float((row(0, q, k, v, has.dim**-0.5)[places] - expected).abs().max() / expected.abs().max())
    assert difference < TOLERANCE, f"forest and chains are {difference:.3g} apart"
    return found | {"largest_difference": difference, "profile": profiled(work, device, 1)}


def changing(has: Sizes, device: torch.device) -> Mapping[str, Any]:
    """Rows whose lengths were not met before, as training has them: what is compiled anew, and the most memory for each square token."""
    before, took, peaks = compiled(), list[float](), list[float | None]()
    for number in range(has.changes):
        prompt, reply = has.tokens[-1] // 4 + 129 * number, has.tokens[-1] // 64 + 3 * number
        forget(device)
        q, k, v = inputs(prompt + SIBLINGS * reply, has, device)
        took.append(round(once(passes(forest(prompt, reply, device), q, k, v), device), 4))
        peaks.append(peak_gib(device))
    return {"first_calls_s": took, "peaks_gib": peaks, "compiled": _since(before)}


def forest(prompt: int, reply: int, device: torch.device) -> Any:
    """A shared prompt, and its siblings' replies."""
    return forest_row([Segment(prompt, -1), *[Segment(reply, 0)] * SIBLINGS], device, torch.bfloat16)


def inputs(num: int, has: Sizes, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(num)
    shapes = (has.heads, has.kv_heads, has.kv_heads)
    return tuple(torch.randn(num, heads, has.dim, generator=generator).to(device, torch.bfloat16).requires_grad_() for heads in shapes)


def passes(row: Any, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(row(0, q, k, v, q.shape[-1] ** -0.5).float().square().sum(), (q, k, v))


def compiled() -> dict[str, int]:
    """Graphs that torch has compiled in this process, and calls that it compiled them for."""
    stats = counters["stats"]
    return {"graphs": int(stats["unique_graphs"]), "calls_captured": int(stats["calls_captured"])}


def _since(before: Mapping[str, int]) -> dict[str, int]:
    return {name: num - before[name] for name, num in compiled().items()}
