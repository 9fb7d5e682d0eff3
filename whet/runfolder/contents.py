"""The parts of a report: what `passed_on` lets through of each file of a run."""

from __future__ import annotations

import os
import re
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from whet.files import parse_object
from whet.observe.inside import open_inside
from whet.runfolder import passed_on
from whet.runfolder.environment import environment
from whet.types import JSON

LOG_LINES = 5000
METRIC_LINES = 200
MAX_BYTES = 4 << 20
"""Read of a file; of lines the last ones."""
MAX_FILES = 10_000
"""Limit on the files of a listed folder."""
_VERSION = re.compile(r"\d{1,4}(?:\.\d{1,6}){1,3}(?:\.?(?:a|b|rc|dev|post)\d{1,8})?(?:\+(?:cpu|cu\d{2,3}|rocm[\d.]{1,8}))?")
_MACHINE = re.compile(r"(?:AMD|Intel\(R\)|NVIDIA|Apple|Tesla|Ampere)(?: [A-Za-z0-9@().-]{1,12}){1,9}")
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:[+-]\d\d:\d\d)?) (info|warning|error) *(.*)")


class RunFiles:
    """Files of a folder that is reported of: no link in it is followed, only ordinary files are opened, and of one `MAX_BYTES` are read.

    Args:
        folder: named by the user.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused: dict[str, str] = {}
        """Files that could not be read, by name, with the reason."""

    def __contains__(self, name: str) -> bool:
        return os.path.lexists(self.folder / name)

    def read(self, name: str, *, end: bool = False) -> bytes:
        """The beginning of a file, or its end. Of one that cannot be read nothing; `refused` says why."""
        try:
            with open_inside(self.folder, name) as file:
                if end:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_BYTES))
                return file.read(MAX_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            self.refused[name] = f"which cannot be read ({error.strerror})"
        except ValueError:
            self.refused[name] = "which is a link, or no ordinary file"
        return b""

    def lines(self, name: str, count: int) -> list[str]:
        """The last lines of a file."""
        return self.read(name, end=True).decode("utf-8", "replace").splitlines()[-count:]

    def rows(self, name: str, count: int) -> list[dict[str, JSON]]:
        """The objects in the last lines of a file."""
        return [row for line in self.lines(name, count) if (row := parse_object(line)) is not None]

    def json(self, name: str) -> dict[str, JSON] | None:
        """A JSON file's object; None if it is not whole."""
        return parse_object(self.read(name))

    def toml(self, name: str) -> dict[str, JSON] | None:
        """A TOML file's table; None if it is not whole."""
        try:
            return tomllib.loads(self.read(name).decode())
        except (ValueError, RecursionError):
            return None


def folders_in(folder: Path) -> list[str]:
    """The folders in a folder, links left out; none if it is none."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for _, entry in zip(range(MAX_FILES), entries, strict=False) if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def clean_start(row: Mapping[str, JSON]) -> dict[str, JSON]:
    """A line of starts.jsonl."""
    return {**_numbers(row, "time", "pid"), **_environment(row), "command": passed_on.command(str(row.get("command")))}


def _numbers(row: Mapping[str, JSON], *keys: str) -> dict[str, JSON]:
    return {key: row[key] if _is_number(row[key]) else passed_on.blank(row[key]) for key in keys if key in row}


def _is_number(value: JSON) -> bool:
    return value is None or isinstance(value, bool) or (isinstance(value, int | float) and not abs(value) > 1e18)


def _environment(row: Mapping[str, JSON]) -> dict[str, JSON]:
    found = row.get("environment")
    return {"environment": _like(found, _here())} if isinstance(found, Mapping) else {}


_here = cache(environment)


def _like(found: JSON, here: JSON) -> JSON:
    """Values of an environment under the keys of this machine's environment. Only numbers, versions,
    makers' names and values equal to this machine's are kept; other text is blanked."""
    if isinstance(found, Mapping) and isinstance(here, Mapping):
        return {key: _like(value, here[key]) for key, value in found.items() if key in here}
    if isinstance(found, list):
        keys = ("name", "capability", "memory_gib")
        return [_like(each, dict.fromkeys(keys)) for each in found if isinstance(each, Mapping)]
    if isinstance(found, str):
        return found if found == here or _VERSION.fullmatch(found) or _MACHINE.fullmatch(found) else passed_on.blank(found)
    return found if _is_number(found) else passed_on.blank(found)


def clean_log(lines: list[str]) -> str:
    """Lines of log.txt: times, and what whet's own sentences say."""
    return "".join(f"{_log_line(line)}\n" for line in lines)


def _log_line(line: str) -> str:
    if found := _LOG_LINE.fullmatch(line):
        when, level, text = found.groups()
        first, sep, rest = text.partition(": ")
        if re.fullmatch(r"start \d{1,9}, process \d{1,9}", first):
            return f"{when} {level:<7} {first}{sep}{passed_on.command(rest)}"
        return f"{when} {level:<7} {passed_on.words(text)}"
    return passed_on.words(line)


def clean_failure(row: Mapping[str, JSON]) -> dict[str, JSON]:
    """A line of failures.jsonl."""
    kept = _numbers(row, "time")
    if "kind" in row:
        kept["kind"] = passed_on.kind(row["kind"])
    if "where" in row:
        kept["where"] = passed_on.name(str(row["where"]))
    return {**kept, **_clean_error(row)}


def clean_end(end: Mapping[str, JSON]) -> dict[str, JSON]:
    """end.json."""
    kept = _numbers(end, "time", "user_code")
    if "status" in end:
        kept["status"] = passed_on.name(str(end["status"]))
    if isinstance(end.get("resume_command"), str):
        kept["resume_command"] = passed_on.command(end["resume_command"])
    if "kind" in end:
        kept["kind"] = passed_on.kind(end["kind"])
    return {**kept, **(_clean_error(end) if "message" in end else {})}


def _clean_error(row: Mapping[str, JSON]) -> dict[str, JSON]:
    frames = row.get("frames")
    return {
        "message": passed_on.words(str(row.get("message"))),
        "frames": passed_on.frames([str(line) for line in frames]) if isinstance(frames, list) else [],
    }


def metric_rows(rows: list[dict[str, JSON]]) -> Iterator[dict[str, JSON]]:
    """The numbers of lines of metrics.jsonl."""
    for row in rows:
        clean = passed_on.named({key: value for key, value in row.items() if _is_number(value)})
        odd = row.get("nonfinite")
        if isinstance(odd, list):
            clean["nonfinite"] = [passed_on.name(name) for name in odd if isinstance(name, str)]
        yield clean


def clean_manifest(manifest: Mapping[str, JSON]) -> JSON:
    """A checkpoint's manifest: counters, measured numbers, the environment, the sizes of parts. With a digest guesses could be tried."""
    kept: dict[str, JSON] = _numbers(manifest, "format")
    for key in ("progress", "metrics"):
        if isinstance(manifest.get(key), Mapping):
            kept[key] = passed_on.named({each: value for each, value in manifest[key].items() if _is_number(value)})
    if isinstance(manifest.get("facts"), Mapping):
        kept["facts"] = _environment(manifest["facts"])
    if isinstance(manifest.get("parts"), Mapping):
        parts = {name: part.get("size_bytes") for name, part in manifest["parts"].items() if isinstance(part, Mapping)}
        kept["sizes_bytes"] = passed_on.named({name: size for name, size in parts.items() if _is_number(size)})
    return kept


def listing(folder: Path) -> str:
    """Every file with its size in bytes and its date; links and the like by their kind."""
    lines: list[str] = []
    for place, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(place) / name for name in sorted(names)):
            if len(lines) == MAX_FILES:
                return "".join([*lines, f"and more: {MAX_FILES} are listed\n"])
            with suppress(FileNotFoundError):  # a run that is running replaces files
                found = path.lstat()
                date = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.st_mtime))
                kind = "" if stat.S_ISREG(found.st_mode) else "  (no ordinary file)"
                lines.append(f"{found.st_size:>14}  {date}  {passed_on.name(path.relative_to(folder).as_posix())}{kind}\n")
    return "".join(lines)
