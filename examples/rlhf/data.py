"""The model and the data of the example, made on the spot: nothing is downloaded, and a seed says it all.

    python examples/rlhf/data.py [--seed 0] [--out runs/rlhf]

    base/                    a small Qwen3-architecture model with random weights, and a tokenizer
    data/sft.jsonl           conversations: a question about a capital, and the reply of a demonstrator who may be wrong, curt or rude
    data/pairs.jsonl         preference pairs: two replies to a question of which a judge preferred the first
    data/pairs_held_out.jsonl
    data/prompts.jsonl       questions for PPO
    data/prompts_held_out.jsonl

A judge prefers reply a to reply b with probability 1 / (1 + exp(q(b) - q(a))), the model of Bradley and Terry, where q is the quality of
`preference.py`. So judges err, and no reward model can agree with all of their choices: each pair holds both qualities, from which the
best possible accuracy follows. Held-out questions share no (wording, country) with training.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from preference import FRIENDLY, RUDE, parts

from whet.quickstart.model import SmallModelConfig, make_model
from whet.types import JSON

WORDINGS = (
    "Capital of {}?",
    "Name the capital of {}.",
    "What is the capital of {}?",
    "Which city leads {}?",
    "Where is {} governed from?",
    "Tell me the capital of {}.",
)
CITIES = {
    "Australia": ("Canberra", "Sydney"),
    "Brazil": ("Brasilia", "Salvador"),
    "Canada": ("Ottawa", "Toronto"),
    "China": ("Beijing", "Shanghai"),
    "Colombia": ("Bogota", "Medellin"),
    "Ecuador": ("Quito", "Guayaquil"),
    "Germany": ("Berlin", "Hamburg"),
    "Ghana": ("Accra", "Kumasi"),
    "Italy": ("Rome", "Milan"),
    "Japan": ("Tokyo", "Osaka"),
    "Kazakhstan": ("Astana", "Almaty"),
    "Kenya": ("Nairobi", "Mombasa"),
    "Morocco": ("Rabat", "Casablanca"),
    "Myanmar": ("Naypyidaw", "Yangon"),
    "Nigeria": ("Abuja", "Lagos"),
    "Pakistan": ("Islamabad", "Karachi"),
    "Poland": ("Warsaw", "Krakow"),
    "Portugal": ("Lisbon", "Porto"),
    "Scotland": ("Edinburgh", "Glasgow"),
    "Spain": ("Madrid", "Barcelona"),
    "Switzerland": ("Bern", "Zurich"),
    "Turkey": ("Ankara", "Istanbul"),
    "Ukraine": ("Kyiv", "Odesa"),
    "Vietnam": ("Hanoi", "Saigon"),
}
"""A country's capital, and a city that is taken for it."""
HELD_OUT_SHARE = 0.2
RIGHT_SHARE, COMPLETE_SHARE = 0.5, 0.6
MANNERS_SHARES = (0.3, 0.4, 0.3)
"""Of the demonstrators' replies: friendly, plain, rude."""
SHAPE = SmallModelConfig(num_layers=2, max_positions=128)


@dataclass(frozen=True, slots=True)
class Question:
    """A wording with a country."""

    text: str
    country: str

    @property
    def answer(self) -> str:
        return CITIES[self.country][0]

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.text.encode()) % 1000 < HELD_OUT_SHARE * 1000

    @property
    def row(self) -> dict[str, JSON]:
        return {"prompt": self.text, "label": self.answer}


def draw_question(rng: random.Random, *, held_out: bool) -> Question:
    """A question of the wanted side."""
    while True:
        country = rng.choice(tuple(CITIES))
        question = Question(rng.choice(WORDINGS).format(country), country)
        if question.held_out == held_out:
            return question


def draw_reply(question: Question, rng: random.Random) -> str:
    """What a demonstrator says: each side of its quality by chance. Half of the wrong cities are the country's, half another's capital."""
    city, other = CITIES[question.country]
    if rng.random() >= RIGHT_SHARE:
        elsewhere = [capital for country, (capital, _) in CITIES.items() if country != question.country]
        city = other if rng.random() < 0.5 else rng.choice(elsewhere)
    body = f"It is {city}." if rng.random() < COMPLETE_SHARE else city
    leads = rng.choices((FRIENDLY, ("",), RUDE), MANNERS_SHARES)[0]
    return f"{rng.choice(leads)} {body}".strip()


def draw_pair(question: Question, rng: random.Random) -> dict[str, JSON]:
    """Two different replies and a judge's choice, with the true quality of each."""
    first = second = draw_reply(question, rng)
    while second == first:
        second = draw_reply(question, rng)
    qualities = [sum(parts(reply, question.answer).values()) for reply in (first, second)]
    chosen = 0 if rng.random() < 1 / (1 + math.exp(qualities[1] - qualities[0])) else 1
    replies = (first, second)
    return {
        "prompt": question.text,
        "chosen": replies[chosen],
        "rejected": replies[1 - chosen],
        "chosen_quality": qualities[chosen],
        "rejected_quality": qualities[1 - chosen],
    }


def write_all(out: Path, seed: int, *, num_conversations: int = 12000, num_pairs: int = 16000, num_held_out: int = 1000) -> None:
    """Write the model and the data.

    Args:
        out: folder for `base` and `data`.
        seed: of everything.
        num_conversations: for SFT.
        num_pairs: for the reward model; as many questions for PPO.
        num_held_out: held-out pairs; a quarter as many held-out questions for PPO.
    """
    conversations = [
        {"messages": [{"role": "user", "content": question.text}, {"role": "assistant", "content": draw_reply(question, rng)}]}
        for question, rng in _questions(f"{seed}/sft", num_conversations, held_out=False)
    ]
    _write(out / "data/sft.jsonl", conversations)
    for name, num, held_out in (("pairs", num_pairs, False), ("pairs_held_out", num_held_out, True)):
        _write(out / f"data/{name}.jsonl", (draw_pair(*drawn) for drawn in _questions(f"{seed}/{name}", num, held_out=held_out)))
    for name, num, held_out in (("prompts", num_pairs, False), ("prompts_held_out", num_held_out // 4, True)):
        _write(out / f"data/{name}.jsonl", (question.row for question, _ in _questions(f"{seed}/{name}", num, held_out=held_out)))
    messages = [message for row in conversations for message in row["messages"]]
    make_model(out / "base", (text for message in messages for text in (message["role"], message["content"])), SHAPE, seed)


def _questions(seed: str, num: int, *, held_out: bool) -> Iterator[tuple[Question, random.Random]]:
    rng = random.Random(seed)
    for _ in range(num):
        yield draw_question(rng, held_out=held_out), rng


def _write(path: Path, rows: Iterable[Mapping[str, JSON]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The model and the data of the RLHF example.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/rlhf"))
    chosen = parser.parse_args()
    write_all(chosen.out, chosen.seed)
    print(f"model and data: {chosen.out}")
