"""The model and the tasks of the example, made on the spot.

    python examples/self_play/data.py [--out runs/self_play]

The model has seen proposers who are right four times of ten, and critics whose verdicts are right six times of ten.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from game import CRITIC, PROPOSER

from whet.init.make import make_started
from whet.types import Message

OPPOSITES = {"hot": "cold", "big": "small", "old": "new", "wet": "dry", "fast": "slow", "hard": "soft", "full": "empty", "dark": "light"}
NUM_SHOWN, NUM_STEPS = 6000, 250


def demonstrations(rng: random.Random) -> list[tuple[Message, ...]]:
    """Conversations of proposers and critics."""
    words, shown = sorted(OPPOSITES), list[tuple[Message, ...]]()
    others = sorted(OPPOSITES.values())
    for _ in range(NUM_SHOWN // 2):
        word = rng.choice(words)
        answer = OPPOSITES[word] if rng.random() < 0.3 else rng.choice(others)
        shown.append((Message("system", PROPOSER), Message("user", word), Message("assistant", answer)))
        answer = OPPOSITES[word] if rng.random() < 0.5 else rng.choice(others)
        verdict = (answer == OPPOSITES[word]) == (rng.random() < 0.6)
        shown.append((Message("system", CRITIC), Message("user", f"{word} {answer}"), Message("assistant", "yes" if verdict else "no")))
    return shown


def write_all(out: Path, num_steps: int = NUM_STEPS) -> None:
    """Write the model and the tasks."""
    out.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": word, "label": opposite} for word, opposite in OPPOSITES.items()]
    (out / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_started(out / "model", demonstrations(random.Random(0)), num_steps=num_steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The model and the tasks of the self-play example.")
    parser.add_argument("--out", type=Path, default=Path("runs/self_play"))
    write_all(parser.parse_args().out)
