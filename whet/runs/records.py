"""`whet records`: the trajectories of a run as a table, one with its tokens, or as JSON lines."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whet.core.choices import Clip
from whet.observe.display import Cell, Display
from whet.observe.record_query import RecordQuery
from whet.observe.records.query import choose, config_hash_of, read_chosen, records_folder, write_jsonl
from whet.observe.records.schema import COMPUTED, SAMPLED
from whet.observe.transcript import proofs_of
from whet.types import Origin

LISTED = {
    "rollout_id": "rollout",
    "trajectory": "trajectory",
    "outcome": "outcome",
    "reward": "reward",
    "num_turns": "turns",
    "num_tokens": "tokens",
    "mean_abs_advantage": "mean |A|",
    "dropped": "dropped",
    "error": "error",
}
"""Columns of the index in the list, and their headings."""
LISTED_ROWS = 20
SHOWN = ("origin", "logprobs", "advantages", "first_ratio", "first_clip", "first_entropy", "first_ranks", "first_losses")
"""Per-token columns that are shown unless others are asked for."""
TEXT = 72
"""Letters of a message that are shown."""


def list_records(run: Path, query: RecordQuery, display: Display) -> int:
    """Show the chosen trajectories, at most `query.limit` of them. Returns how many were chosen."""
    found, limit = choose(records_folder(run), query), query.limit or LISTED_ROWS
    if len(found):
        rows = found.slice(0, limit).select(list(LISTED)).to_pylist()
        used = [name for name in LISTED if name not in ("dropped", "error") or any(row[name] is not None for row in rows)]
        more = f", the first {limit} of them (--limit)" if len(found) > limit else ""
        cells = [[row[name] for name in used] for row in rows]
        display.table(f"{run}: {len(found)} trajectories{more}", [LISTED[name] for name in used], cells)
    return len(found)


def export_records(run: Path, query: RecordQuery, file: Path, display: Display) -> int:
    """Write the rows of the chosen trajectories to a file of JSON lines. Returns the number of trajectories."""
    folder = records_folder(run)
    found = choose(folder, query).slice(0, query.limit)
    display.note(f"{file}: {write_jsonl(folder, found, file, query.role)} rows of {len(found)} trajectories")
    return len(found)


def show_trajectory(run: Path, query: RecordQuery, display: Display) -> None:
    """Show a trajectory: its facts, its messages, and each of its tokens.

    Args:
        run: as for `records_folder`.
        query: with the trajectory's id; of several rollouts, the newest one is shown.
        display: receives the tables.

    Raises:
        ValueError: there is no such trajectory or column.
    """
    folder, columns = records_folder(run), query.columns.split(",") if query.columns else []
    found = choose(folder, query)
    if not len(found):
        near = choose(folder, RecordQuery(task=(query.trajectory or "").partition("/")[0])).column("trajectory").to_pylist()
        hint = f"there is {', '.join(dict.fromkeys(near[:5]))}" if near else f"whet records {run} lists them"
        raise ValueError(f"no trajectory {query.trajectory!r} is in these records; {hint}")
    (table,) = read_chosen(folder, found.slice(len(found) - 1, 1), query.role)
    if unknown := [name for name in columns if name not in table.column_names or name == "tokens"]:
        known = [name for name in table.column_names if name in {**SAMPLED, **COMPUTED} and name != "tokens"]
        raise ValueError(f"--columns: there is no per-token column {', '.join(unknown)}; there are {', '.join(known)}")
    rows = table.to_pylist(maps_as_pydicts="strict")
    place = found.slice(len(found) - 1, 1).to_pylist()[0]
    display.table(f"trajectory {place['trajectory']}", ("", "value"), _facts(rows, config_hash_of(folder / place["file"])))
    messages = [(message, None) for message in rows[0]["prompt"] or ()] + [(turn, turn) for turn in rows[0]["turns"]]
    display.table("messages", ("role", "text", "finish", "context", "sampled"), [_message(*each) for each in messages])
    text_of = _texts(run)
    for row in rows:
        title = "tokens" if len(rows) == 1 else f"tokens of sample {row['order']}"
        title += f" ({row['role']})" if row.get("role") else ""
        if row["tokens"] is None:
            display.note("its tokens were not recorded (observe.records.trajectories)")
            continue
        names = [name for name in columns or SHOWN if columns or row.get(name) is not None]
        cells = [[t, token, text_of(token), *(_cell(name, row[name], t) for name in names)] for t, token in enumerate(row["tokens"])]
        display.table(title, ("place", "id", "text", *names), cells)


def _facts(rows: list[dict[str, Any]], config_hash: str) -> list[tuple[str, Cell]]:
    row = rows[0]
    facts: dict[str, Any] = {name: row[name] for name in ("rollout_id", "task_id", "outcome", "stop", "dropped", "reward", "reward_detail")}
    facts |= {f"reward: {name}": value for name, value in (row["reward_components"] or {}).items()}
    facts |= {name: row.get(name) for name in ("label", "group_size", "group_mean", "group_std", "mean_abs_advantage", "temperature")}
    facts |= {f"seconds: {name}": value for name, value in (row["timings"] or {}).items()}
    if row["error"] is not None:
        facts["error"] = f"{row['error']['kind']} in {row['error']['where']}: {row['error']['message']}"
    facts |= {f"version {version}": proof.words() for version, proof in proofs_of(rows).items()}
    facts["config hash"] = config_hash[:16] or None
    return [(name, _short(value) if isinstance(value, str) else value) for name, value in facts.items() if value not in (None, "")]


def _message(message: dict[str, Any], turn: dict[str, Any] | None) -> list[Cell]:
    text = " ".join(part for part in (message.get("reasoning_content"), message["content"], message["tool_calls"]) if part)
    sizes = [None, None, None] if turn is None else [turn["finish"], turn["num_context"], turn["num_tokens"]]
    return [message["role"] or "prompt", _short(text), *sizes]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT else f"{line[: TEXT - 3]}..."


def _cell(name: str, values: Sequence[Any] | None, t: int) -> Cell:
    value = None if values is None else values[t]
    if value is None:
        return None
    if name == "origin":
        return Origin(value).name.lower()
    if name.endswith("_clip"):
        return Clip(value).name.lower()
    return str(value).lower() if isinstance(value, bool) else value


def _texts(run: Path) -> Any:
    """Function from a token's id to its text: by the tokenizer of the run's model, if there is one on this machine."""
    candidates = [run / "model", run.parent / "model"]
    settings = run / "config.toml"
    if settings.exists():
        candidates.append(Path(tomllib.loads(settings.read_text()).get("model", {}).get("path", "")))
    for folder in candidates:
        file = folder / "tokenizer.json"
        if file.is_file():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(file))
            return lambda token: repr(tokenizer.decode([token], skip_special_tokens=False))[1:-1]
    return lambda token: ""
