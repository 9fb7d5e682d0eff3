"""Keeps the curve of a run with SmolLM2, with replies before and after, and draws it.

    whet quickstart --model smollm2
    python docs/draw_smollm2.py runs/quickstart-smollm2-seed0/rl sums

writes benchmarks/results/smollm2_sums.json and docs/pictures/smollm2-sums.svg. The replies are those to problems that are
spread over the held-out set, in the first evaluation and in the last.
"""

from __future__ import annotations

import json
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draw_front_page import BLUE, DARK, GREY, RED, json_lines, words

from whet.observe.records import read_records

ROOT = Path(__file__).resolve().parents[1]
NUM_REPLIES = 6
LONGEST = 44
"""Characters of a reply that are shown."""
WIDTH, HEIGHT = 900, 590
LEFT, RIGHT, TOP, BOTTOM = 62, 870, 78, 290
GREEN = "#1a7f37"
ACCURACY = "eval/held_out/reward/total"


def kept(run: Path) -> dict[str, Any]:
    """What is kept of a run."""
    rows, start = json_lines(run / "metrics.jsonl"), json_lines(run / "starts.jsonl")[-1]
    settings = tomllib.loads((run / "config.toml").read_text())
    cpu = start["environment"]["cpu"]
    return {
        "command": start["command"],
        "date": time.strftime("%Y-%m-%d", time.gmtime(start["time"])),
        "cpu": f"{cpu['model']}, {cpu['threads']} of {cpu['cores']} cores",
        "batch": [settings["batch"]["prompts_per_rollout"], settings["batch"]["samples_per_prompt"]],
        "lr": settings["train"]["optim"]["lr"],
        "seconds": round(rows[-1]["time"] - start["time"]),
        "rewards": [round(row["reward/total"], 4) for row in rows if "reward/total" in row],
        "held_out": [[row["step"], row[ACCURACY]] for row in rows if ACCURACY in row],
        "by_kind": by_kind(run / "evaluations/held_out/rollouts"),
        "replies": replies(run / "evaluations/held_out/rollouts"),
    }


def by_kind(folder: Path) -> dict[str, dict[str, list[int]]]:
    """Held-out problems that are right and all, by rollout and by the column `kind` of their rows; without such a column, all are one."""
    found: dict[str, dict[str, list[int]]] = {}
    for path in sorted(folder.glob("*.parquet")):
        kinds = found.setdefault(str(int(path.stem.rpartition("_")[2])), {})
        for row in read_records(path):
            right, num = kinds.get(kind := json.loads(row["metadata"] or "{}").get("kind", "all"), [0, 0])
            kinds[kind] = [right + (row["reward"] > 0), num + 1]
    return found


def replies(folder: Path) -> list[dict[str, Any]]:
    """The same problems, spread over the set, in the first and the last evaluation: [{prompt, label, before, after}]."""
    files = sorted(folder.glob("*.parquet"))
    first, last = ({row["task_id"].partition("#")[0]: row for row in read_records(path)} for path in (files[0], files[-1]))
    chosen = list(first)[:: max(len(first) // NUM_REPLIES, 1)][:NUM_REPLIES]
    return [
        {
            "prompt": first[task]["prompt"][-1]["content"],
            "label": first[task]["label"],
            **{when: each[task]["turns"][-1]["content"] for when, each in (("before", first), ("after", last))},
            **{f"{when}_reward": each[task]["reward"] for when, each in (("before", first), ("after", last))},
        }
        for task in chosen
    ]


def picture(found: Mapping[str, Any]) -> str:
    """The curve, and the replies below it."""
    rewards, held_out = found["rewards"], found["held_out"]
    last = len(rewards)

    def at(rollout: float, share: float) -> tuple[float, float]:
        return LEFT + (RIGHT - LEFT) * rollout / last, BOTTOM - (BOTTOM - TOP) * share

    parts = [
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10" fill="#ffffff" stroke="#d0d7de" />',
        words(LEFT, 34, f"SmolLM2-135M-Instruct: {held_out[0][1]:.2f} → {held_out[-1][1]:.2f} in {minutes(found)}", DARK, 20, "bold"),
        f'<path d="M{LEFT} 54 h26" stroke="{BLUE}" stroke-width="2" />',
        words(LEFT + 34, 59, "share of sampled replies that are right", GREY),
        f'<circle cx="{LEFT + 360}" cy="54" r="6" fill="{RED}" />',
        words(LEFT + 374, 59, "held-out problems, temperature 0", GREY),
    ]
    for tick in range(0, 11, 2):
        _, y = at(0, tick / 10)
        parts.append(f'<path d="M{LEFT} {y:.1f} H{RIGHT}" stroke="#d8dee4" />')
        parts.append(words(LEFT - 10, y + 5, f"{tick / 10:.1f}", GREY, anchor="end"))
    for rollout in sorted({round(last * quarter / 4) for quarter in range(5)}):
        x, _ = at(rollout, 0)
        parts += [f'<path d="M{x:.1f} {BOTTOM} v6" stroke="{GREY}" />', words(x, BOTTOM + 22, str(rollout), GREY, anchor="middle")]
    line = " ".join("{:.1f},{:.1f}".format(*at(i, reward)) for i, reward in enumerate(rewards, 1))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="2" stroke-linejoin="round" stroke-opacity="0.6" />')
    for rollout, share in held_out:
        x, y = at(rollout, share)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{RED}" stroke="#ffffff" stroke-width="2" />')
    prompts, samples = found["batch"]
    told = (f"rollouts of GRPO, {prompts} problems with {samples} replies each", f"{found['command']}, {found['cpu']}, {found['date']}")
    for y, text in zip((BOTTOM + 44, BOTTOM + 64), told, strict=True):
        parts.append(words((LEFT + RIGHT) / 2, y, text, GREY, 14, anchor="middle"))
    parts += table(found["replies"])
    return "\n".join([f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg">', *parts, "</svg>\n"])


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Replies before and after; a right one is green."""
    longest, top = max(len(row["prompt"].partition("?")[0]) for row in rows), BOTTOM + 102
    columns = (24, 200, 560) if longest < 24 else (24, 350, 630)
    limit = LONGEST if longest < 24 else LONGEST - 10
    parts = [words(x, top, text, DARK, 15, "bold") for x, text in zip(columns, ("held out", "before", "after"), strict=True)]
    for i, row in enumerate(rows, 1):
        y = top + 27 * i
        parts.append(words(columns[0], y, row["prompt"].partition("?")[0] + "?", DARK, 14))
        for x, when in zip(columns[1:], ("before", "after"), strict=True):
            parts.append(words(x, y, shown(row[when], limit), GREEN if row[f"{when}_reward"] > 0 else RED, 14))
    return parts


def shown(reply: str, limit: int) -> str:
    """A reply on one line."""
    text = " ".join(reply.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def minutes(found: Mapping[str, Any]) -> str:
    return f"{found['seconds'] / 60:.1f} minutes"


def main(run: Path, name: str) -> None:
    found = kept(run)
    (ROOT / f"benchmarks/results/smollm2_{name}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    (ROOT / f"docs/pictures/smollm2-{name}.svg").write_text(picture(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
