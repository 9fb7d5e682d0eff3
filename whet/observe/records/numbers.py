"""Numbers that credit and optimizer steps computed for a rollout, as its records take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whet.types import Proof


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """Scores of a group's valid trajectories, as its advantages compare them."""

    size: int
    """Number of valid trajectories."""
    mean: float
    std: float
    """With one less than the size in its denominator; 0 for a group of one."""


@dataclass(frozen=True, slots=True)
class RolloutNumbers:
    """Arrays over the samples of a rollout, in their order. They must not be written to any more."""

    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arrays over the tokens of all samples, by column: those of `schema.COMPUTED`, or of any other name. NaN: not computed. [T]"""
    value_after: Any = None
    """A critic's estimate after the last token of each sample. None: there is no critic. [N]"""
    groups: Mapping[tuple[str, str], GroupNumbers] = field(default_factory=dict[tuple[str, str], GroupNumbers])
    """Numbers of the groups, by the id of their task and the role that is compared ("" without roles)."""
    proofs: Mapping[int, Proof] = field(default_factory=dict[int, Proof])
    """Proof of each version of the policy, as far as it is known."""
