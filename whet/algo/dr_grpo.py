"""Dr.GRPO: GRPO without the two divisions that bias it, by the group's std and by the reply's length. arXiv 2503.20783."""

from __future__ import annotations

from whet.algo.grpo import GRPOConfig
from whet.core.weights import ReducerName, ScaledReducerName


class DrGRPOConfig(GRPOConfig):
    """Dr.GRPO's settings."""

    normalize_std: bool = False
    """Divide the advantage by the group's standard deviation."""
    reducer: ReducerName | ScaledReducerName = "constant_length"
    """constant_length divides sums over tokens by one number, whatever their length."""
