"""Check that a device attends over forests as it does over chains, made before a run relies on it."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.model.attention import PackedRow
from whet.model.decoder import DecoderModel
from whet.model.forest import Segment, forest_row

PROMPT, FIRST, SECOND = 150, 40, 70
"""Tokens of a prompt and of the two replies to it: longer than a block, and no multiple of one."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""Largest distance from chains, relative to their norm. float32 on CUDA may multiply with less precision."""


def forest_fault(model: DecoderModel) -> str | None:
    """Reason that a model's forests differ from its chains on its device. None if they do not.

    Random queries, keys and values of the model's shapes go through both, forward and backward. The
    weights do not matter.
    """
    for shapes in _shapes(model):
        try:
            distance = _distance(shapes, model.device, model.dtype)
        except Exception as error:  # kernels and their compilers raise what they like
            first = str(error).strip().partition("\n")[0]
            return f"attention over forests fails on {model.device.type}: {type(error).__name__}: {first}"
        if not distance <= TOLERANCE[model.dtype]:
            return f"attention over forests is {distance:.2g} away from attention over chains on {model.device.type}"
    return None


def _shapes(model: DecoderModel) -> set[tuple[tuple[int, int], ...]]:
    """Heads and their sizes of the queries, keys and values, in every layer."""
    found: set[tuple[tuple[int, int], ...]] = set()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        found.add(tuple((x.shape[1], x.shape[2]) for x in (q, k, v)))
        return q.new_zeros(*q.shape[:2], v.shape[2])

    with torch.no_grad():
        tokens = torch.zeros(2, dtype=torch.int64, device=model.device)
        model.hidden(tokens, torch.arange(2, device=model.device), attend)
    return found


def _distance(shapes: tuple[tuple[int, int], ...], device: torch.device, dtype: torch.dtype) -> float:
    """The largest relative distance of outputs and gradients."""
    num_tokens, branch = PROMPT + FIRST + SECOND, PROMPT + FIRST
    forest = forest_row([Segment(PROMPT, -1), Segment(FIRST, 0), Segment(SECOND, 0)], device, dtype)
    chains = PackedRow([branch, PROMPT + SECOND], device)
    place = torch.tensor([*range(branch), *range(PROMPT), *range(branch, num_tokens)], device=device)
    once = torch.tensor([*range(branch), *range(branch + PROMPT, len(place))], device=device)
    generator = torch.Generator().manual_seed(0)
    *inputs, pull = (
        torch.randn(num_tokens, *shape, generator=generator).to(device, dtype) for shape in (*shapes, (shapes[0][0], shapes[2][1]))
    )
    scale = shapes[0][1] ** -0.5
    with torch.enable_grad():
        q, k, v = (x.requires_grad_() for x in inputs)
        outs = forest(0, q, k, v, scale), chains(0, q[place], k[place], v[place], scale)[once]
        found, expected = ([out.detach(), *torch.autograd.grad(out, (q, k, v), pull)] for out in outs)
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))
