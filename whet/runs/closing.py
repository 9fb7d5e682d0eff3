"""Words at the end of a command: figures before and after, three replies, and the next commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from whet.files import parse_object
from whet.observe.transcript import Transcript
from whet.runs.show import ShowQuery, transcripts
from whet.types import JSON

ENDS = 10
"""Steps at each end of a run over which a figure is a mean."""
FIGURES = {"reward/total": "reward", **{f"{kind}/loss": "loss" for kind in ("sft", "dpo", "rm")}, "dpo/accuracy": "accuracy"}
"""Names of the figures, by metric."""
EVALUATED = ("/reward/total", "/accuracy", "/loss")
"""Ends of the evaluation metrics that are shown, and those that begin with `mean@` and `pass@`."""
LETTERS = 160
"""Letters of a prompt and of a reply that are shown."""


def figures(run: Path) -> list[str]:
    """A run's first and last rewards or losses, and its evaluations before and after, a line each."""
    file = run / "metrics.jsonl"
    rows = [row for line in file.read_bytes().splitlines() if (row := parse_object(line)) is not None] if file.exists() else []
    lines: list[str] = []
    for metric, name in FIGURES.items():
        values = _values(rows, metric)
        if len(values) > 1:
            ends = min(ENDS, len(values) // 2)
            first, last = sum(values[:ends]) / ends, sum(values[-ends:]) / ends
            lines.append(f"{name}: {first:.3f} in the first {ends} steps, {last:.3f} in the last {ends}")
    names = dict.fromkeys(name for row in rows for name in row if name.startswith("eval/") and _is_shown(name))
    for name in names:
        values = _values(rows, name)
        before = f"{values[0]:.3f} at first, " if len(values) > 1 else ""
        lines.append(f"{name}: {before}{values[-1]:.3f} at the end")
    return lines


def _is_shown(name: str) -> bool:
    return name.endswith(EVALUATED) or name.rpartition("/")[2].startswith(("mean@", "pass@"))


def _values(rows: Sequence[Mapping[str, JSON]], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def replies(folder: Path) -> list[str]:
    """The best, the worst and a typical reply of the newest rollout in a folder; nothing where there are no records."""
    try:
        found = transcripts(folder, ShowQuery())
    except ValueError:  # observe.records keeps none
        return []
    return [f"{word or 'a'} reply: {_line(each)}" for word, each in found]


def _line(transcript: Transcript) -> str:
    asked = next((part.text for part in transcript.messages if part.role in ("user", "prompt")), "")
    answer = next((part.text for part in reversed(transcript.messages) if part.role == "assistant"), "")
    reward = "no reward" if transcript.reward is None else f"reward {transcript.reward:.3g}"
    return f"{reward}, {_short(asked)!r} -> {_short(answer)!r}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LETTERS else f"{line[: LETTERS - 3]}..."


def next_commands(run: Path, *, scores: bool = False) -> list[str]:
    """Commands that go on with a run that has come to its end; `scores`: its model scores replies, and writes none."""
    shows = [f"  whet show {run}"] if any((run / "rollouts").glob("*.parquet")) else []
    model = run / "model"
    uses = f"whet train CONFIG.toml reward.name=model reward.options.path={model}" if scores else f"whet serve {model}"
    return ["next:", *shows, f"  {uses}"]
