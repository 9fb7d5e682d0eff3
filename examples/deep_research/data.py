"""Pages, tasks, demonstrations and a small model, made on the spot.

    python examples/deep_research/data.py [--seed 0] [--out runs/deep_research]

    data/corpus.jsonl          three pages about each of 400 companies that do not exist: a filing, a rumour and an estimate
    data/train.jsonl           tasks about 300 of them
    data/held_out.jsonl        tasks about the other 100
    data/demonstrations.jsonl  exercises in reading, then conversations: a task, and the work of a demonstrator
    base/                      a small Qwen3-architecture model with random weights, and a tokenizer

Demonstrators are good and bad ones, on purpose and openly. Half of all open the filing and report the first quarter. The others open the
rumour or the estimate and report its figure as that of the year, take the quarter's figure for the year's, or cite a filing that they did
not open. All copy rightly from what they read. The pages of a demonstration have figures of their own, so that a small model learns to
read, and not what a corpus says. Figures are in words, which a small model copies more easily than digits.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.data.formats.tags import wrap_information
from whet.env.research import listed, page_text
from whet.env.search.corpus import Document
from whet.quickstart.model import SmallModelConfig, make_model
from whet.types import Message

TASK = "Today is 14 May 2025. Sum up the results of {} in 2025."
TRADES = (
    *("Foods", "Mills", "Power", "Motors", "Paper", "Steel", "Glass", "Rail", "Toys", "Shoes"),
    *("Media", "Wines", "Boats", "Farms", "Tools", "Books", "Lamps", "Clocks", "Bricks", "Bikes"),
)
NUM_COMPANIES, NUM_HELD_OUT, NUM_FIRST_WORDS = 400, 100, 40
KINDS = ("filing", "forum", "estimate")
THOUGHTS = {"filing": "The register has a filing.", "forum": "A forum knows more.", "estimate": "An estimate has the year."}
"""Words of a demonstrator before it opens a page of a kind."""
CRITERIA = (
    (1.0, "first_quarter", "The report gives the revenue of the first quarter of 2025, {revenue} million, as that of the quarter."),
    (0.5, "official", "The report cites the company's filing."),
    (-0.5, "full_year", "The report gives a figure as the result of the whole year, although the year is not over."),
)
"""Weight, name and text of each criterion of a good report, or of a bad one."""
DEMONSTRATORS = (("good", 0.5), ("forum", 0.15), ("estimate", 0.15), ("wrong_period", 0.1), ("unread", 0.1))
"""Kinds of demonstrators with their shares."""
TENS = {20: "twenty", 30: "thirty", 40: "forty", 60: "sixty", 70: "seventy", 80: "eighty", 90: "ninety"}
UNITS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SHAPE = SmallModelConfig(num_layers=3, max_positions=256)


@dataclass(frozen=True, slots=True)
class Company:
    """A company that does not exist, with all that the corpus says of it."""

    name: str
    revenue: int
    """Revenue of the first quarter of 2025, in millions: the truth."""
    rumour: int
    estimate: int
    """Revenue of the whole year, as some people say and as others expect it."""

    def id_of(self, kind: str) -> str:
        """Id of its page of a kind."""
        return f"{kind} {self.name}"

    @property
    def pages(self) -> list[Document]:
        """Its filing, its rumour and its estimate."""
        revenue, rumour, estimate = (f"{in_words(figure)} million" for figure in (self.revenue, self.rumour, self.estimate))
        texts = (
            ("first quarter", f"Filed in April: {revenue}. The revenue of {self.name} from January to March was {revenue}."),
            ("results of the year", f"A friend knows someone there: {rumour}. The revenue of {self.name} in the year will be {rumour}."),
            ("the year", f"As we expect in March: {estimate}. The revenue of {self.name} in the year will be {estimate}."),
        )
        return [Document(self.id_of(kind), title, text) for kind, (title, text) in zip(KINDS, texts, strict=True)]

    @property
    def task(self) -> dict[str, Any]:
        """Its row."""
        revenue = in_words(self.revenue)
        criteria = [{"weight": weight, "name": name, "text": text.format(revenue=revenue)} for weight, name, text in CRITERIA]
        metadata = {"revenue": [revenue, str(self.revenue)], "filing": self.id_of("filing"), "criteria": criteria}
        return {"prompt": TASK.format(self.name), "label": f"first quarter: {revenue} million", "metadata": metadata}


def company(name: str, rng: random.Random) -> Company:
    """A company with figures that are drawn."""
    quarter, year = (20, 30, 40), (60, 70, 80, 90)
    return Company(name, *(rng.choice(tens) + rng.randrange(1, 10) for tens in (quarter, year, year)))


def in_words(number: int) -> str:
    """A number of two digits in words."""
    return f"{TENS[number // 10 * 10]}-{UNITS[number % 10 - 1]}"


def companies() -> list[Company]:
    """All companies, the held-out ones last. They are the same for every seed."""
    rng = random.Random("companies")
    first: dict[str, None] = {}
    while len(first) < NUM_FIRST_WORDS:
        syllables = (rng.choice("BDFGKLMNPRSTVZ") + rng.choice("aeiou"), rng.choice("lmnrv") + rng.choice("aeiou"), rng.choice("lnrx"))
        first["".join(syllables)] = None
    names = [f"{word} {trade}" for word in first for trade in TRADES]
    return [company(name, rng) for name in rng.sample(names, NUM_COMPANIES)]


def demonstration(name: str, rng: random.Random) -> dict[str, Any]:
    """The conversation of one demonstrator about a company of this name, with figures of its own."""
    shown = company(name, rng)
    (does,) = rng.choices([kind for kind, _ in DEMONSTRATORS], [share for _, share in DEMONSTRATORS])
    kind = does if does in KINDS else "filing"
    found = rng.sample(shown.pages, len(KINDS))
    parts = [f"<search> {name} results </search>", _answer(listed(found, 0))]
    figure = shown.estimate
    if does != "unread":
        page = next(document for document in found if document.id == shown.id_of(kind))
        parts += [f"{THOUGHTS[kind]} <open> {page.id} </open>", _answer(page_text(page, 1, 1000))]
        figure = {"filing": shown.revenue, "forum": shown.rumour, "estimate": shown.estimate}[kind]
    amount = f"{in_words(figure)} million"
    thought, period = ("Only a quarter is over", "first quarter") if does == "good" else ("That is the year", "full year")
    parts.append(f"{thought}: {amount}. <report> {name}, {period}: revenue {amount} [{shown.id_of(kind)}] </report>")
    return {"messages": [{"role": "user", "content": TASK.format(name)}, {"role": "assistant", "content": "".join(parts)}]}


def exercise(name: str, rng: random.Random) -> dict[str, Any]:
    """An exercise in reading: a figure, alone or on a page, is copied. It says nothing of which page is to be trusted."""
    shown = company(name, rng)
    page, figure = rng.choice(list(zip(shown.pages, (shown.revenue, shown.rumour, shown.estimate), strict=True)))
    said = f"{name}, revenue {in_words(figure)} million"
    text = rng.choice((page_text(page, 1, 1000), said))
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": f"{said}. {said}"}]}


def _answer(text: str) -> str:
    return wrap_information(Message("tool", text))


def write_all(out: Path, seed: int, num_demonstrations: int, num_exercises: int) -> None:
    """Write everything into a folder. Exercises come first, then each follows a demonstration."""
    known = companies()
    training = known[:-NUM_HELD_OUT]
    folder = out / "data"
    folder.mkdir(parents=True, exist_ok=True)
    pages = [page for each in known for page in each.pages]
    _write(folder / "corpus.jsonl", ({"id": page.id, "title": page.title, "contents": page.contents} for page in pages))
    _write(folder / "train.jsonl", (each.task for each in training))
    _write(folder / "held_out.jsonl", (each.task for each in known[-NUM_HELD_OUT:]))
    rng = random.Random(f"{seed}/demonstrations")
    kinds = [exercise] * num_exercises + [demonstration, exercise] * num_demonstrations
    conversations = [kind(rng.choice(training).name, rng) for kind in kinds]
    _write(folder / "demonstrations.jsonl", conversations)
    texts = [message["content"] for each in conversations for message in each["messages"]]
    make_model(out / "base", ["user assistant", *texts], SHAPE, seed)


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/deep_research"))
    parser.add_argument("--demonstrations", type=int, default=4000)
    parser.add_argument("--exercises", type=int, default=3200)
    given = parser.parse_args()
    write_all(given.out, given.seed, given.demonstrations, given.exercises)


if __name__ == "__main__":
    main()
