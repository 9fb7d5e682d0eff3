"""The model and the tasks of the example, made on the spot.

    python examples/simulated_user/data.py [--out runs/simulated_user]

The model has seen customers, who say what they want, and sellers, who hand over the right fruit three times of ten.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from shop import FRUITS

from whet.env.simulated_user import BEGIN
from whet.init.make import make_started
from whet.types import Message

SELLER = "You sell fruit."
NUM_SHOWN, NUM_STEPS = 4000, 200


def demonstrations(rng: random.Random) -> list[tuple[Message, ...]]:
    """Conversations as sellers and as customers have them."""
    shown: list[tuple[Message, ...]] = []
    for _ in range(NUM_SHOWN // 2):
        wish = rng.choice(FRUITS)
        given = wish if rng.random() < 0.3 else rng.choice(FRUITS)
        asked, handed = f"One {wish}, please.", f"Here: {given}."
        answer = "Thank you. [DONE]" if given == wish else asked
        shown.append((Message("system", SELLER), Message("user", asked), Message("assistant", handed)))
        customer = Message("system", f"You want: {wish}."), Message("user", BEGIN), Message("assistant", asked)
        shown.append((*customer, Message("user", handed), Message("assistant", answer)))
    return shown


def write_all(out: Path, num_steps: int = NUM_STEPS) -> None:
    """Write the model and the tasks."""
    out.mkdir(parents=True, exist_ok=True)
    prompt = [{"role": "system", "content": SELLER}, {"role": "user", "content": "A customer comes."}]
    rows = [{"prompt": prompt, "label": fruit, "metadata": {"wish": fruit}} for fruit in FRUITS]
    (out / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_started(out / "model", demonstrations(random.Random(0)), num_steps=num_steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The model and the tasks of the example with a simulated user.")
    parser.add_argument("--out", type=Path, default=Path("runs/simulated_user"))
    write_all(parser.parse_args().out)
