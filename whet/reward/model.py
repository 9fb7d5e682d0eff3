"""Options of the reward `model`, apart from what needs torch: workers that run plain functions start without it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.config import Config


class ModelRewardOptions(Config):
    """Options of the reward `model`."""

    path: str
    """A folder or a name on the hub: a model for sequence classification with one label, such as `whet rm` writes."""
    reads: Literal["auto", "tokens", "messages"] = "auto"
    """tokens: the policy's own, which asks for the policy's vocabulary; messages: they go through the reward model's own chat template, for
    conversations of one turn; auto: tokens where the two vocabularies are the same."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of parameters and computation."""
    device: str = "auto"
    """auto picks cuda, then mps, then cpu."""
    trust_remote_code: bool = False
    """Whether code that comes with the model may run."""
    batch_tokens: int = Field(default=8192, ge=1)
    """What waits is scored together, up to so many tokens (a longer one alone); in deterministic mode each one is scored alone."""
