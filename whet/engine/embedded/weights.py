"""New weights into a model that an engine reads."""

from __future__ import annotations

import torch
from torch import Tensor

from whet.model.shards import spread_like


def copy_weights(own: dict[str, Tensor], wire: list[tuple[str, Tensor]]) -> None:
    """Copy arrived weights, which are whole, into the engine's own, all or none; of one that is spread over ranks each takes its part.

    Raises:
        ValueError: naming the weights that are missing, unknown, or of another shape.
    """
    arrived = {name: tensor.shape for name, tensor in wire}
    wrong = sorted(name for name in own.keys() | arrived if name not in own or own[name].shape != arrived.get(name))
    if wrong:
        raise ValueError(
            f"weights that are missing, unknown or of another shape than the engine's ({len(wrong)}): {', '.join(wrong[:5])}"
        )
    with torch.no_grad():
        for name, tensor in wire:
            own[name].copy_(spread_like(tensor, own[name]))
