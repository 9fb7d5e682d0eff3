"""The one attention function that trainer and engine share, registered through transformers' attention
interface.

A model's layers call it with the queries, keys and values of a whole row of tokens. The `Attend` object
that the caller passes through the model's keyword arguments decides which tokens see which: packed
training rows here, a paged cache in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

ATTENTION = "whet"


class Attend(Protocol):
    """Attention over one row of T tokens."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend.

        Args:
            layer: index of the layer, for caches.
            q: [T, heads, D].
            k: [T, kv_heads, D]; v: [T, kv_heads, Dv].
            scale: factor of the scores.

        Returns:
            [T, heads, Dv].
        """
        ...


def whet_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    attend: Attend | None = None,
    **features: Any,
) -> tuple[Tensor, None]:
    """The function behind `attn_implementation="whet"`. q, k, v: [1, heads, T, D]; returns [1, T, heads, Dv]."""
    name = type(module).__name__
    if attend is None:
        raise ValueError(f"{name}: the model does not hand keyword arguments on to its attention; whet cannot run it")
    for feature in ("sliding_window", "softcap", "s_aux", "sinks", "position_bias"):
        if features.get(feature) is not None:
            raise ValueError(f"{name} needs the attention feature {feature!r}, which whet does not support yet")
    if dropout:
        raise ValueError(f"{name}: attention dropout is {dropout}; set attention_dropout to 0 in the model's config")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    return attend(layer, q, k, v, scale)[None], None


def whet_mask(*args: Any, config: PreTrainedConfig, local_size: int | None = None, **kwargs: Any) -> None:
    """No mask: `Attend` knows who sees whom. A model that asks for a local one is refused, unless none of its layers takes it."""
    if local_size and _has_local_layers(config):
        raise ValueError(
            f"{config.model_type} attends to a window of {local_size} tokens (sliding or chunked attention), which whet does not "
            "support yet"
        )


def _has_local_layers(config: PreTrainedConfig) -> bool:
    """True if some layer may attend to only a part of the earlier tokens; a model that does not state
    the kind of each layer may."""
    kinds = getattr(config, "layer_types", None)
    return kinds is None or any(kind != "full_attention" for kind in kinds)


AttentionInterface.register(ATTENTION, whet_attention)
AttentionMaskInterface.register(ATTENTION, whet_mask)


@dataclass(frozen=True, slots=True)
class SegmentBucket:
    """Segments of similar length, attended to together as a right-padded block."""

    gather: Tensor
    """Row index of each padded place; the padding repeats the segment's first token. [n * L] int64"""
    num: int
    length: int


class PackedRow:
    """Causal attention within each segment of a row, and never across.

    Segments of similar length share one right-padded causal call: a real query never sees the padding behind it, and
    the padding's own outputs are dropped, so the result is that of each segment alone.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, max_waste: float = 1.3) -> None:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self.buckets: list[SegmentBucket] = []
        place = torch.empty(starts[-1], dtype=torch.int64)
        used = 0
        for members in similar(lengths, max_waste):
            longest = max(lengths[i] for i in members)
            first = torch.tensor([starts[i] for i in members])[:, None]
            size = torch.tensor([lengths[i] for i in members])[:, None]
            steps = torch.arange(longest)[None]
            gather = first + steps
            slots = used + torch.arange(gather.numel()).view_as(gather)
            if min(lengths[i] for i in members) == longest:
                place[gather] = slots
            else:
                inside = steps < size
                place[gather[inside]] = slots[inside]
                gather = torch.where(inside, gather, first)
            used += gather.numel()
            self.buckets.append(SegmentBucket(gather.flatten().to(device), len(members), longest))
        self.place = place.to(device)
        self.positions = torch.cat([torch.arange(n) for n in lengths]).to(device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        outs: list[Tensor] = []
        for bucket in self.buckets:
            queries, keys, values = (
                x.index_select(0, bucket.gather).view(bucket.num, bucket.length, *x.shape[1:]).transpose(1, 2)
                for x in (q, k, v)
            )
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            outs.append(out.transpose(1, 2).flatten(0, 1))
        return torch.cat(outs).index_select(0, self.place)


def similar(lengths: Sequence[int], max_waste: float) -> list[list[int]]:
    """Segments by length, cut where the shortest of a bucket would be padded by more than `max_waste`."""
    buckets: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] == 0:
            continue
        if buckets and lengths[buckets[-1][0]] <= max_waste * lengths[i] + 8:
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return buckets
