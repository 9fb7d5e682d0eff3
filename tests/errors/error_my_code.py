"""The code of a user: rewards, tools and a parser, with the mistakes that docs/errors.md shows."""

import itertools
import time

from whet.data.parsers import Parsed
from whet.types import Message, ToolCall

FIRST = "train/0#0/0"
"""The first trajectory of a run."""


def variety(trajectory):
    """What of it may be learned does not matter here: the siblings of a prompt differ."""
    return trajectory.turns[0].tokens[0] % 7 / 7


def difficulty(trajectory):
    return variety(trajectory) * trajectory.task.metadata["difficulty"]


def level(trajectory):
    return trajectory.task.metadata["level"]


def slow(trajectory):
    if trajectory.id == FIRST:
        time.sleep(600)
    return variety(trajectory)


def not_a_number(trajectory):
    return float("nan") if trajectory.id == FIRST else variety(trajectory)


def infinite(trajectory):
    return float("inf") if trajectory.id == FIRST else variety(trajectory)


def text(trajectory):
    return "0.5" if trajectory.id == FIRST else variety(trajectory)


def crash(trajectory):
    import os

    if trajectory.id == FIRST:
        os.kill(os.getpid(), 11)
    return variety(trajectory)


def with_two_answers(trajectory, reference):
    return float(trajectory.response == reference)


def asks(tool):
    """A parser to which every turn is a call of the tool; the very first asks for a city that there is not."""
    turns = itertools.count()

    def parse(text):
        city = "Rome" if next(turns) else "Atlantis"
        return Parsed(Message("assistant", text, (ToolCall(tool, {"city": city}, "call_0"),)))

    return parse


asks_population, asks_mayor, asks_weather = asks("population"), asks("mayor"), asks("weather")


def population(city: str) -> int:
    """Looks up how many people live in a city."""
    return {"Rome": 2_754_000}[city]


def mayor(city: str) -> str:
    """Looks up who governs a city."""
    if city == "Atlantis":
        raise ValueError(f"there is no city {city!r}; ask for one that exists")
    return "someone"


def weather(city: str) -> str:
    """Asks how warm it is in a city."""
    time.sleep(60 if city == "Atlantis" else 0)
    return "warm"
