"""A small model and demonstrations to warm it up, made on the spot: `python examples/search_qa/data.py [--seed 0] [--out runs/search_qa]`.

    base/                      a small Qwen3-architecture model with random weights, and a tokenizer
    data/demonstrations.jsonl  exercises in copying, then conversations: a question, and what a demonstrator does about it

Demonstrators are sloppy, on purpose and openly: one of five answers from nowhere without a search, half of all search for the country, city
or element and not for what is asked about it, and three of ten write a good query. They copy rightly what they get, so the form can be
learned from them, and a good query is what reinforcement learning has to find. In most passages of theirs the value is made up, or
another one of its kind: a small model would learn the corpus by heart, and not to read. Exercises say nothing of searching.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from pathlib import Path

from env import CORPUS, information

from whet.env.search.searcher import Searcher
from whet.quickstart.model import SmallModelConfig, make_model

HERE = Path(__file__).parent
GUESS_SHARE, GOOD_SHARE = 0.2, 0.3
"""Shares of the demonstrators; the others name the entity alone."""
MADE_UP_SHARE, SWAPPED_SHARE = 0.6, 0.3
"""Shares of the passages: a value that nothing has stands in it, or that of something else."""
NUM_EXERCISES = 24000
"""Made-up words to copy, before all demonstrations: a small model copies a name that it never saw piece by piece, or not at all."""
SHAPE = SmallModelConfig(num_layers=3, max_positions=256)


def rows_of(name: str) -> list[dict]:
    """The rows of a file of the example."""
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text("utf-8").splitlines()]


def demonstration(row: dict, searcher: Searcher, values: dict[str, list[str]], rng: random.Random) -> str:
    """The assistant's turn of one demonstrator.

    Args:
        row: the question.
        searcher: of the corpus.
        values: all values of each property.
        rng: decides what the demonstrator does.
    """
    draw, entity = rng.random(), row["metadata"]["entity"]
    if draw < GUESS_SHARE:
        return f"<answer> {rng.choice(values[row['metadata']['property']])} </answer>"
    query = f"{row['metadata']['property']} {entity}" if draw < GUESS_SHARE + GOOD_SHARE else entity
    passage = searcher.search(query, 1)[0].document.contents
    fact, _, value = passage.removesuffix(".").rpartition(" is ")
    draw, alike = rng.random(), values[fact.rpartition(": the ")[2]]
    if draw < MADE_UP_SHARE + SWAPPED_SHARE:
        value = made_up(alike, rng) if draw < MADE_UP_SHARE else rng.choice(alike)
        passage = f"{fact} is {value}."
    return f"<search> {query} </search>{information([passage])}<answer> {value} </answer>"


def exercise(values: dict[str, list[str]], entities: list[str], rng: random.Random) -> dict:
    """An exercise in copying: words that mean nothing."""
    words = [made_up(entities if rng.random() < 0.5 else rng.choice(list(values.values())), rng) for _ in range(rng.randint(4, 7))]
    text = " is ".join(words)
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}]}


def made_up(values: list[str], rng: random.Random) -> str:
    """A value of a kind that nobody has seen: the beginning of one and the end of another, digits and domains drawn anew."""
    one, other = rng.choice(values), rng.choice(values)
    if one.startswith(".") or one.isdigit():
        return "".join(rng.choice(string.digits if c.isdigit() else string.ascii_lowercase) if c.isalnum() else c for c in one)
    return one[: rng.randint(1, len(one))] + other[rng.randint(0, len(other) - 1) :]


def write_all(out: Path, seed: int, num_demonstrations: int) -> None:
    """Write the model and the demonstrations."""
    rng = random.Random(f"{seed}/demonstrations")
    searcher, rows = Searcher(str(CORPUS)), rows_of("train")
    values: dict[str, list[str]] = {}
    for row in rows:
        values.setdefault(row["metadata"]["property"], []).append(row["label"])
    entities = [row["metadata"]["entity"] for row in rows]
    conversations = [exercise(values, entities, rng) for _ in range(NUM_EXERCISES)]
    for _ in range(num_demonstrations):
        row = rng.choice(rows)
        reply = demonstration(row, searcher, values, rng)
        conversations.append({"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": reply}]})
    path = out / "data/demonstrations.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in conversations), encoding="utf-8")
    texts = [message["content"] for each in conversations for message in each["messages"]]
    make_model(out / "base", ["user assistant", *texts], SHAPE, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/search_qa"))
    parser.add_argument("--demonstrations", type=int, default=28800)
    given = parser.parse_args()
    write_all(given.out, given.seed, given.demonstrations)


if __name__ == "__main__":
    main()
