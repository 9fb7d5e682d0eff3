"""The rows of the example, made on the spot: `python examples/mcp_files/data.py [--seed 0] [--out runs/mcp_files]`.

    train.jsonl     800 rows
    held_out.jsonl  100 rows, with other people in them

The metadata of a row has the `files` that its folder begins with, and those that are `wanted` at the end. A row is one of three jobs: find
a number, write it into a file, or change one.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from whet.types import JSON

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ida", "Jon", "Kim", "Leo", "Mia", "Nils", "Olga", "Paul")
HELD_OUT_NAMES = ("Rita", "Sam", "Tess", "Udo", "Vera", "Will", "Yara", "Zoe")
TEAMS = ("blue", "green", "red", "white")
NUM_TRAIN, NUM_HELD_OUT, NUM_PEOPLE = 800, 100, 5
SYSTEM = "You work in a folder, with tools that list, read, write and change its files. Paths are relative to the folder."


def make_row(rng: random.Random, names: tuple[str, ...]) -> dict[str, JSON]:
    """A row: a job in a folder of some people and their teams."""
    people = rng.sample(names, NUM_PEOPLE)
    rooms = dict(zip(people, rng.sample(range(100, 1000), NUM_PEOPLE), strict=True))
    leads = dict(zip(rng.sample(TEAMS, 2), people, strict=False))
    files = {f"people/{name.lower()}.txt": about(name, room, rng.randint(1000, 9999)) for name, room in rooms.items()}
    files |= {f"teams/{team}.txt": f"Team: {team}\nLead: {lead}\n" for team, lead in leads.items()}
    team, lead = rng.choice(sorted(leads.items()))
    room, wanted, label = rooms[lead], dict(files), None
    job = rng.choice(("find", "write", "change"))
    if job == "find":
        asked, label = f"In which room is the lead of the {team} team? Answer with the number of the room.", str(room)
    elif job == "write":
        asked = f"Write the number of the room of the {team} team's lead, and nothing else, into the file answer.txt."
        wanted["answer.txt"] = str(room)
    else:
        moved = rng.choice([number for number in range(100, 1000) if number not in rooms.values()])
        asked = f"The lead of the {team} team moves to room {moved}. Change it in that person's file, and change nothing else."
        path = f"people/{lead.lower()}.txt"
        wanted[path] = files[path].replace(f"Room: {room}", f"Room: {moved}")
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    return {"prompt": prompt, "label": label, "metadata": {"job": job, "files": files, "wanted": wanted}}


def about(name: str, room: int, phone: int) -> str:
    """The file about a person."""
    return f"Name: {name}\nRoom: {room}\nPhone: {phone}\n"


def write_all(out: Path, seed: int = 0) -> None:
    """Write both files."""
    out.mkdir(parents=True, exist_ok=True)
    for name, names, num in (("train", NAMES, NUM_TRAIN), ("held_out", HELD_OUT_NAMES, NUM_HELD_OUT)):
        rng = random.Random(f"{seed}/{name}")
        (out / f"{name}.jsonl").write_text("".join(json.dumps(make_row(rng, names)) + "\n" for _ in range(num)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/mcp_files"))
    given = parser.parse_args()
    write_all(given.out, given.seed)


if __name__ == "__main__":
    main()
