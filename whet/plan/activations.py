"""Memory of a model's layers for a packed row, in bytes: forward and backward, or forward alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from whet.model.attention import PackedRow
from whet.model.decoder import DecoderModel
from whet.plan.live import LiveBytes

META = torch.device("meta")


def trained_weights(model: DecoderModel) -> dict[str, Tensor]:
    """The weights that train: all, or an adapter's."""
    return {name: p for name, p in model.named_weights() if p.requires_grad}


def activation_bytes(model: DecoderModel, lengths: Sequence[int]) -> tuple[int, int]:
    """Bytes that the layers keep of a packed row after its forward pass, and bytes at the peak of its
    backward pass.

    Args:
        model: on the meta device.
        lengths: tokens of the row's samples; all but each one's first are predicted.
    """
    predicting = torch.zeros(sum(lengths) - len(lengths), dtype=torch.int64, device=META)
    hooks = [p.register_post_accumulate_grad_hook(drop_gradient) for p in trained_weights(model).values()]
    try:
        with LiveBytes(lambda _: "kept") as live:
            picked = _hidden(model, lengths).index_select(0, predicting)
            kept = live.now("kept")
            picked.backward(torch.empty_like(picked))
    finally:
        for hook in hooks:
            hook.remove()
    return kept, live.peak("kept")


def forward_bytes(model: DecoderModel, lengths: Sequence[int]) -> int:
    """Bytes at the peak of a forward pass that keeps nothing. Arguments as for `activation_bytes`."""
    with LiveBytes(lambda _: "made") as live, torch.no_grad():
        _hidden(model, lengths)
    return live.peak("made")


def _hidden(model: DecoderModel, lengths: Sequence[int]) -> Tensor:
    row = PackedRow(lengths, META)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        with _FlashStandIn():
            return row(layer, q, k, v, scale)

    return model.hidden(torch.zeros(sum(lengths), dtype=torch.int64, device=META), row.positions, attend)


def drop_gradient(param: Tensor) -> None:
    """A gradient that was added up is planned with the optimizer."""
    param.grad = None


class _Flash(torch.autograd.Function):
    """Keeps for the backward pass what flash attention keeps: queries, keys, values, output, log-sum-exp
    (arXiv 2205.14135).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _FlashStandIn(TorchFunctionMode):
    """Replaces torch's attention by `_Flash`, since on the meta device torch would choose the one that
    keeps every score."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _Flash.apply(*args[:3])
        return func(*args, **(kwargs or {}))
