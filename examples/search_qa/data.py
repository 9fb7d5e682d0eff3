"""A small model and demonstrations to warm it up, made on the spot: `python examples/search_qa/data.py [--seed 0] [--out runs/search_qa]`.

    base/                      a small Qwen3-architecture model with random weights, and a tokenizer
    data/demonstrations.jsonl  conversations: a question, and what a demonstrator does about it

Demonstrators are sloppy, on purpose and openly: 3 of 10 answer from nowhere without a search; half of the others' queries name the country
and not what is asked for, and they copy what they get. A quarter of all write a good query. What they copy, they copy rightly: the form can
be learned from them, and a good query is what reinforcement learning has to find.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from env import CORPUS, information

from whet.env.search.searcher import Searcher
from whet.quickstart.model import SmallModelConfig, make_model

HERE = Path(__file__).parent
GUESS_SHARE, GOOD_SHARE = 0.3, 0.25
"""Of the demonstrators; the others name the entity alone."""
SHAPE = SmallModelConfig(num_layers=3, max_positions=256)


def rows_of(name: str) -> list[dict]:
    """The rows of a file of the example."""
    return [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text("utf-8").splitlines()]


def demonstration(row: dict, searcher: Searcher, others: list[str], rng: random.Random) -> str:
    """The assistant's turn of one demonstrator.

    Args:
        row: the question.
        searcher: of the corpus.
        others: values of the property that is asked for.
        rng: decides what the demonstrator does.
    """
    draw, entity = rng.random(), row["metadata"]["entity"]
    if draw < GUESS_SHARE:
        return f"<answer> {rng.choice(others)} </answer>"
    query = f"{row['metadata']['property']} {entity}" if draw < GUESS_SHARE + GOOD_SHARE else entity
    passage = searcher.search(query, 1)[0].document.contents
    value = passage.rsplit(" is ", 1)[1].removesuffix(".")
    return f"<search> {query} </search>{information([passage])}<answer> {value} </answer>"


def write_all(out: Path, seed: int, num_demonstrations: int) -> None:
    """Write the model and the demonstrations."""
    rng = random.Random(f"{seed}/demonstrations")
    searcher, rows = Searcher(str(CORPUS)), rows_of("train")
    values: dict[str, list[str]] = {}
    for row in rows:
        values.setdefault(row["metadata"]["property"], []).append(row["label"])
    conversations = []
    for _ in range(num_demonstrations):
        row = rng.choice(rows)
        reply = demonstration(row, searcher, values[row["metadata"]["property"]], rng)
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
    parser.add_argument("--demonstrations", type=int, default=12000)
    given = parser.parse_args()
    write_all(given.out, given.seed, given.demonstrations)


if __name__ == "__main__":
    main()
