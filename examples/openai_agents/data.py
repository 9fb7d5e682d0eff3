"""The rows of the example, made on the spot: `python examples/openai_agents/data.py [--out runs/openai_agents]`.

    orders.json     the orders of the shop, the same at every start
    train.jsonl     questions to train on
    held_out.jsonl  questions about other orders, and the same about the shop
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from whet.types import JSON

CITIES = ("Bonn", "Delft", "Ghent", "Leeds", "Lyon", "Malmo", "Porto", "Turin")
GOODS = ("a lamp", "a chair", "two cups", "a clock", "a rug", "three plates")
STATES = ("packed", "on its way", "delivered", "sent back")
ABOUT_ORDERS = {
    "city": ("To which city does order {} go?", CITIES),
    "state": ("Is order {} packed, on its way, delivered or sent back?", STATES),
    "goods": ("What is in order {}?", GOODS),
}
"""Wordings about a property of an order, and the values that it can have."""
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
HOURS = ("9", "17")
ABOUT_THE_SHOP = (
    ("When do you close on Fridays?", "17", HOURS),
    ("When do you open?", "9", HOURS),
    ("On which day are you closed?", "Monday", DAYS),
)
HELD_OUT_SHARE, SHOP_SHARE = 0.2, 0.2


def all_orders(num: int = 300) -> dict[str, dict[str, str]]:
    """Orders by their number."""
    rng = random.Random(0)
    numbers = rng.sample(range(1000, 10000), num)
    return {str(number): {"goods": rng.choice(GOODS), "city": rng.choice(CITIES), "state": rng.choice(STATES)} for number in numbers}


def make_row(text: str, label: str, values: Sequence[str]) -> dict[str, JSON]:
    """A row. An answer that names another one of the values, too, is no answer."""
    return {"prompt": text, "label": label, "metadata": {"others": [value for value in values if value != label]}}


def rows() -> dict[str, list[dict[str, JSON]]]:
    """The rows of both files."""
    orders = list(all_orders().items())
    num_held_out = round(len(orders) * HELD_OUT_SHARE)
    found: dict[str, list[dict[str, JSON]]] = {}
    for name, part in (("train", orders[num_held_out:]), ("held_out", orders[:num_held_out])):
        asked = [
            make_row(text.format(number), order[what], values) for number, order in part for what, (text, values) in ABOUT_ORDERS.items()
        ]
        shop = [make_row(*each) for each in ABOUT_THE_SHOP]
        found[name] = asked + shop * round(len(asked) * SHOP_SHARE / len(shop))
    return found


def write_all(out: Path) -> None:
    """Write the files."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "orders.json").write_text(json.dumps(all_orders()), encoding="utf-8")
    for name, part in rows().items():
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The rows of the example with OpenAI's agents.")
    parser.add_argument("--out", type=Path, default=Path("runs/openai_agents"))
    write_all(parser.parse_args().out)
