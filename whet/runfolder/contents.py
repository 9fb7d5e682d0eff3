"""What of a run's files may leave the machine: where things happened and how often, not what was said."""

from __future__ import annotations

import os
import re
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from whet.observe.files import last_lines, parse_object
from whet.runfolder.messages import LEFT_OUT, own_message, without_quotes
from whet.runfolder.redact import Redactor
from whet.types import JSON

LOG_LINES = 5000
METRIC_LINES = 200
CONTEXT_LINES = 200
"""Read before the log's lines that are kept, so that a secret of several lines is whole when it is looked for."""


def clean_start(row: Mapping[str, JSON], redactor: Redactor) -> dict[str, JSON]:
    """A line of starts.jsonl."""
    kept = redactor.tree({key: row[key] for key in ("time", "pid", "environment") if key in row})
    return {**kept, "command": redactor.command(str(row.get("command")))}


def clean_log(path: Path, redactor: Redactor, *, messages: bool) -> str:
    """The last lines of log.txt. A text that it quotes is left out like a message."""
    entries = re.split(r"\n(?!    )", "\n".join(last_lines(path, LOG_LINES + CONTEXT_LINES)))
    clean = [redactor.text(entry) for entry in entries]
    if not messages:
        clean = [without_quotes(entry) for entry in clean]
    return "".join(f"{line}\n" for line in "\n".join(clean).split("\n")[-LOG_LINES:])


def clean_failure(row: Mapping[str, JSON], redactor: Redactor, *, messages: bool) -> dict[str, JSON]:
    """A line of failures.jsonl. Environments, tools and rewards raise what they like, so its message counts as data."""
    kept = redactor.tree({key: row[key] for key in ("time", "kind", "where") if key in row})
    return {**kept, **_clean_error(row, redactor, messages=messages, own=False)}


def clean_end(end: Mapping[str, JSON], redactor: Redactor, *, messages: bool) -> dict[str, JSON]:
    """end.json. The message of an error that no user's code took part in is kept, without the text that it quotes."""
    kept = redactor.tree({key: end[key] for key in ("status", "time", "kind", "user_code") if key in end})
    if isinstance(end.get("resume_command"), str):
        kept["resume_command"] = redactor.command(end["resume_command"])
    if "message" in end:
        kept.update(_clean_error(end, redactor, messages=messages, own=end.get("user_code") is False))
    return kept


def _clean_error(row: Mapping[str, JSON], redactor: Redactor, *, messages: bool, own: bool) -> dict[str, JSON]:
    message, frames = redactor.text(str(row.get("message"))), row.get("frames")
    clean: dict[str, JSON] = {
        "message": message if messages else own_message(message) if own else LEFT_OUT,
        "frames": [redactor.code(str(line)) for line in frames] if isinstance(frames, list) else [],
    }
    return {**clean, "traceback": redactor.text(str(row.get("traceback")))} if messages else clean


def metric_rows(path: Path, redactor: Redactor) -> Iterator[dict[str, JSON]]:
    """The numbers in the last lines of metrics.jsonl."""
    for line in last_lines(path, METRIC_LINES):
        row = parse_object(line)
        if row is None:
            continue
        clean: dict[str, JSON] = {key: value for key, value in row.items() if value is None or isinstance(value, int | float)}
        if isinstance(row.get("nonfinite"), list):
            clean["nonfinite"] = [redactor.shapes(name) for name in clean if name in row["nonfinite"]]
        yield {redactor.shapes(key): value for key, value in clean.items()}


def clean_manifest(manifest: Mapping[str, JSON], redactor: Redactor) -> JSON:
    """A checkpoint's manifest without its state, which may hold trajectories, and without digests of the settings: whoever has one can
    try guesses of a secret that is in them."""
    kept = {key: value for key, value in manifest.items() if key not in ("state", "digest")}
    for table in (kept.get("facts"), kept.get("parts")):
        if isinstance(table, dict):
            table.pop("config_hash", None)
            table.pop("config.toml", None)
    return redactor.tree(kept)


def listing(folder: Path, redactor: Redactor) -> str:
    """Every file with its size in bytes and its date."""
    lines: list[str] = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(place) / name for name in sorted(names)):
            with suppress(FileNotFoundError):  # a run that is running replaces files
                found = path.lstat()
                date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.st_mtime))
                lines.append(f"{found.st_size:>14}  {date}  {path.relative_to(folder).as_posix()}\n")
    return redactor.shapes("".join(lines))


def read_json(path: Path) -> dict[str, JSON] | None:
    """A JSON file's object; None if there is none, or it is not whole."""
    try:
        return parse_object(path.read_text(errors="replace"))
    except OSError:
        return None


def read_toml(path: Path) -> dict[str, JSON] | None:
    """A TOML file's table; None if there is none, or it is not whole."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return None
