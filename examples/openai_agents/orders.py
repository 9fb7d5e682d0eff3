"""The orders of the shop, the same at every start."""

from __future__ import annotations

import random

CITIES = ("Bonn", "Delft", "Ghent", "Leeds", "Lyon", "Malmo", "Porto", "Turin")
GOODS = ("a lamp", "a chair", "two cups", "a clock", "a rug", "three plates")
STATES = ("packed", "on its way", "delivered", "sent back")


def all_orders(num: int = 300) -> dict[int, dict[str, str]]:
    """Orders by their number."""
    rng = random.Random(0)
    numbers = rng.sample(range(1000, 10000), num)
    return {number: {"goods": rng.choice(GOODS), "city": rng.choice(CITIES), "state": rng.choice(STATES)} for number in numbers}
