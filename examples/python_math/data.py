"""A small model, problems and demonstrations, made on the spot: `python examples/python_math/data.py [--seed 0] [--out runs/python_math]`.

    base/                      a small Qwen3-architecture model with random weights, and a tokenizer
    data/demonstrations.jsonl  conversations: a problem, and what a demonstrator does about it
    data/train.jsonl           problems to train on
    data/held_out.jsonl        others

Demonstrators are sloppy, on purpose and openly: most of them guess and compute nothing, and in half of the wordings most of those who
write a program write a wrong one. They copy rightly, so the form can be learned from them. What gets the answers right is left to
reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from whet.env.build import EnvConfig, tools_of
from whet.quickstart.model import SmallModelConfig, make_model
from whet.types import JSON, Message, ToolCall

GUESS_SHARE, MISTAKE_SHARE = 0.5, 0.6
"""Demonstrators who guess; of the others, in sloppy wordings, those who write the wrong program."""
NUM_TRAIN, NUM_HELD_OUT = 4000, 200
SHAPE = SmallModelConfig(num_layers=3, max_positions=384)


@dataclass(frozen=True, slots=True)
class Wording:
    """A way to ask, and the program that answers. `{a}`, `{b}` and `{c}` have three digits, `{d}` has one, and a >= b."""

    text: str
    thought: str
    """A demonstrator's words before the program."""
    program: str
    mistake: str = ""
    """The program that most demonstrators write; empty: they are careful."""


WORDINGS = (
    Wording("A hall has {a} rows with {b} seats each. How many seats does it have?", "I multiply.", "print({a}*{b})"),
    Wording("A train carries {a} crates of {b} bottles. How many bottles is that?", "I combine.", "print({a}*{b})", "print({a}+{b})"),
    Wording("A town has {a} old and {b} young people. How many live there?", "I combine.", "print({a}+{b})", "print({a}*{b})"),
    Wording("A farm had {a} sheep and sold {b} of them. How many are left?", "I take away.", "print({a}-{b})"),
    Wording("Each of {a} bags has {b} nuts in it. How many nuts are there?", "I multiply.", "print({a}*{b})"),
    Wording(
        "There are {a} books of {b} pages, and {c} pages are torn. How many are whole?",
        "Step by step.",
        "total = {a}*{b}\nprint(total-{c})",
    ),
    Wording(
        "A shop has {a} boxes of {b} pens and {c} loose pens. How many pens is that?",
        "Step by step.",
        "total = {a}*{b}\nprint(total+{c})",
        "total = {a}*{b}\nprint(total-{c})",
    ),
    Wording("{d} friends share {a} coins. How many coins are left over?", "I share out.", "print({a}%{d})", "print({a}//{d})"),
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A wording with its numbers."""

    wording: Wording
    numbers: dict[str, int]

    @property
    def text(self) -> str:
        return self.wording.text.format(**self.numbers)

    @property
    def answer(self) -> str:
        return printed(self.wording.program.format(**self.numbers))

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.text.encode()) % 10 == 0

    def row(self) -> dict[str, JSON]:
        return {"prompt": self.text, "label": self.answer, "metadata": {"wording": WORDINGS.index(self.wording)}}


def printed(program: str) -> str:
    """The output of one of the programs above. They are this file's own: no sandbox is started for them."""
    with redirect_stdout(StringIO()) as out:
        exec(program, {})
    return out.getvalue().strip()


def draw(rng: random.Random, *, held_out: bool) -> Problem:
    """A problem of the wanted side; wordings are equally frequent."""
    wording = rng.choice(WORDINGS)
    while True:
        b, a = sorted(rng.randint(100, 999) for _ in range(2))
        found = Problem(wording, {"a": a, "b": b, "c": rng.randint(100, 999), "d": rng.randint(3, 9)})
        if found.held_out == held_out:
            return found


def demonstration(problem: Problem, rng: random.Random) -> list[Message]:
    """The conversation of one demonstrator."""
    asked = Message("user", problem.text)
    if rng.random() < GUESS_SHARE:
        return [asked, Message("assistant", f"I guess. The answer is {10 ** (len(problem.answer) - 1)}.")]
    wording = problem.wording
    wrong = bool(wording.mistake) and rng.random() < MISTAKE_SHARE
    program = (wording.mistake if wrong else wording.program).format(**problem.numbers)
    result = printed(program)
    call = Message("assistant", wording.thought, (ToolCall("python", {"code": program}),))
    return [asked, call, Message("tool", result, name="python"), Message("assistant", f"The answer is {result}.")]


def write_all(out: Path, seed: int, num_demonstrations: int) -> None:
    """Write the model and the data."""
    rng = random.Random(f"{seed}/python_math")
    (tool,) = tools_of(EnvConfig(name="tools", tools=["python"]))
    shown = [demonstration(draw(rng, held_out=False), rng) for _ in range(num_demonstrations)]
    files: dict[str, list[dict[str, JSON]]] = {
        "demonstrations": [{"messages": [message.to_dict() for message in talk], "tools": [dict(tool.schema)]} for talk in shown],
        "train": [draw(rng, held_out=False).row() for _ in range(NUM_TRAIN)],
        "held_out": [draw(rng, held_out=True).row() for _ in range(NUM_HELD_OUT)],
    }
    (out / "data").mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        (out / f"data/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = [message.content for talk in shown for message in talk]
    calls = [json.dumps({"name": "python", "arguments": dict(call.arguments)}) for talk in shown for m in talk for call in m.tool_calls]
    make_model(out / "base", ["user assistant system\nTools: python(code)", *texts, *calls], SHAPE, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/python_math"))
    parser.add_argument("--demonstrations", type=int, default=14400)
    given = parser.parse_args()
    write_all(given.out, given.seed, given.demonstrations)


if __name__ == "__main__":
    main()
