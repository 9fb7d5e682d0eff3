"""Arrival of weights: copied into a model's own tensors, each checked before it is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whet.model.digest import digests_of
from whet.model.shards import spread_like
from whet.transport.base import Stream


@dataclass(frozen=True, slots=True)
class Arrived:
    """Weights that arrived over a wire."""

    digests: Mapping[str, str]
    """Digest of each tensor as it arrived."""
    size_bytes: int


def copy_weights(own: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]], *, digest: bool = True) -> Arrived:
    """Copy weights, which are whole, into a model's own; of one that is spread over ranks each takes its part.

    All or none, but for a `Stream`: what is wrong in the middle of that shows when the weights before it have been written.

    Args:
        own: the model's weights.
        weights: by the same names.
        digest: compute digests of the tensors; otherwise `digests` is empty.

    Raises:
        ValueError: naming the weights that are missing, unknown, or of another shape.
    """
    if not isinstance(weights, Stream):
        weights = whole_set(own, weights)
    digests: dict[str, str] = {}
    size_bytes = 0
    lacking = dict.fromkeys(own)
    with torch.no_grad():
        for name, tensor in weights:
            _check([name] if name not in lacking or own[name].shape != tensor.shape else [])
            del lacking[name]
            if digest:
                digests |= digests_of([(name, tensor)])
            own[name].copy_(spread_like(tensor, own[name]))
            size_bytes += tensor.nbytes
    _check(list(lacking))
    return Arrived(digests, size_bytes)


def whole_set(own: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Weights of a model, all of them looked at before any is used.

    Raises:
        ValueError: naming the weights that are missing, unknown, or of another shape.
    """
    out = list(weights)
    shapes = {name: tensor.shape for name, tensor in out}
    _check(sorted(name for name in own.keys() | shapes if name not in own or own[name].shape != shapes.get(name)))
    return out


def _check(wrong: list[str]) -> None:
    if wrong:
        raise ValueError(
            f"weights that are missing, unknown or of another shape than the engine's ({len(wrong)}): {', '.join(wrong[:5])}"
        )
