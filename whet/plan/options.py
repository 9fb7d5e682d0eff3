"""Options of `whet plan`, each with its help on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, text: str, **more: object) -> Any:
    """A field with its help, and what else the command line knows of it: the least value (`min`), another name (`flag`)."""
    return field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of `whet plan`."""

    model: str
    """A model folder or a hub name."""
    devices: int = _option(1, "Devices that train it.", min=1)
    memory_gib: float = _option(80.0, "Memory of each device in GiB.", min=1e-6, flag="--memory")
    per_node: int = _option(8, "Devices of a node, with fast links.", min=1)
    longest: int = _option(8192, "Tokens of the longest sample.", min=1)
    budget: int = _option(16_384, "train.max_tokens_per_device.", min=1)
    samples: int = _option(256, "Samples of an optimizer step.", min=1)
    dtype: str = _option("bfloat16", "model.dtype.")
    recompute: bool = _option(True, "model.gradient_checkpointing.")
    reference: bool = _option(False, "Keep a frozen reference.")
    lora_rank: int | None = _option(None, "Rank of an adapter that trains instead.", min=1, flag="--lora")
    degrees: str | None = _option(None, "Plan only this layout: shard=8,tensor=2")
    offload: bool = _option(False, "train.offload.")
