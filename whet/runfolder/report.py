"""`whet report`: what a maintainer needs of a run, in a zip file: what whet itself says, numbers and names, and nothing else."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from whet.config import dump_toml
from whet.runfolder import passed_on
from whet.runfolder.contents import (
    LOG_LINES,
    METRIC_LINES,
    RunFiles,
    clean_end,
    clean_failure,
    clean_log,
    clean_manifest,
    clean_start,
    folders_in,
    listing,
    metric_rows,
)
from whet.runfolder.environment import environment
from whet.runfolder.journal import END, FAILURES, LOG, STARTS
from whet.runfolder.lock import LOCK, owner_of
from whet.types import JSON

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
STACKS = "stacks.txt"
CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"
MANIFESTS = f"{CHECKPOINTS}/*/{MANIFEST}"
MAX_MANIFESTS, MAX_CONFIGS, MAX_RUNS = 100, 50, 50
"""Number of records that are packed, the newest and the first among them."""
ROWS = 1000
README = "README.txt"
LISTING = "files.txt"
ENVIRONMENT = "environment.json"

_PARTS = {
    f"{CONFIG}, config.<n>.toml": "the settings of the last start, and of earlier ones that differed",
    STARTS: "when and with which command it was started, and the environment then",
    LOG: f"what the run said: the last {LOG_LINES} lines",
    METRICS: f"the numbers of the last {METRIC_LINES} lines",
    FAILURES: "the first failure of each kind and place: its type and where in whet it was",
    END: "how the last start ended; there is none if it is running or was killed",
    STACKS: "where in whet every thread was, if something took too long",
    MANIFESTS: "what each checkpoint consists of, without its state",
    ENVIRONMENT: "the machine that made this report, at that time",
    LISTING: "every file of the folder, with its size in bytes and its date",
}
_README = """Report of a run, made by `whet report`.

{notes}

What is in it (several runs lie in folders of their own):
{parts}

What passes: numbers, true and false under keys that whet declares; the sentences, names and choices that are in
whet's own source; types of exceptions; frames in whet's own files; versions and makers' names of the machine.
Everything else is replaced by its type and length: texts, paths, addresses, options of rewards and tools, keys that
whet does not know, what fills the gaps of whet's sentences, and messages of other code.

How to look at it: every file is text; a .jsonl file has a JSON object in each line. Begin with end.json, failures.jsonl
and the end of log.txt. Times in JSON are seconds since the epoch.
"""


@dataclass(slots=True)
class Report:
    """The members of the zip file, and what its README.txt says of them."""

    members: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])

    def add(self, name: str, text: str) -> None:
        self.members[passed_on.fresh(passed_on.name(name), self.members)] = text

    def add_json(self, name: str, tree: JSON) -> None:
        self.add(name, json.dumps(tree, indent=1) + "\n")

    def left_out(self, name: str, why: str) -> None:
        self.notes.append(f"  Left out: {passed_on.name(name)}, {why}.")


def write_report(run: Path, output: Path | None = None) -> Path:
    """Pack a run's report. The run may be running, and the folder may hold several runs.

    Args:
        run: the run's folder (its run_dir).
        output: the zip file; None: `<name of the run>-report.zip` in the current folder.

    Returns:
        The zip file.

    Raises:
        ValueError: if the folder holds no run, or the file is there already or cannot be written.
    """
    runs = find_runs(run)
    target = output or Path(f"{run.resolve().name}-report.zip")
    report = Report()
    for folder in runs:
        add_run(report, folder, folder.relative_to(run).as_posix())
    report.add(LISTING, listing(run))
    report.add_json(ENVIRONMENT, environment())
    parts = "\n".join(f"  {part:<28} {what}" for part, what in _PARTS.items())
    report.add(README, _README.format(notes="\n".join(report.notes), parts=parts))
    write_zip(target, report.members)
    return target


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, and the runs in the two levels below it (as a quickstart has
    them); links are no folders.

    Raises:
        ValueError: if there are none.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; whet report takes the folder of a run (its run_dir)")
    near = [folder / name for name in folders_in(folder)]
    below = sorted([*near, *(path / name for path in near for name in folders_in(path))])
    runs = [path for path in (folder, *below) if any(name in RunFiles(path) for name in (STARTS, METRICS))]
    if not runs and LOCK in RunFiles(folder):
        runs = [folder]  # it ended before it could say anything
    if not runs:
        what = f"neither it nor a folder in it has a {STARTS} or {METRICS}"
        raise ValueError(f"{folder} is not the folder of a run: {what}; whet report takes the folder of a run (its run_dir)")
    return runs[:MAX_RUNS]


def add_run(report: Report, folder: Path, name: str) -> None:
    """Add a run's files, and note what is missing or left out."""
    files, prefix = RunFiles(folder), "" if name == "." else f"{name}/"
    report.notes.append(f"{'The run' if name == '.' else passed_on.name(name)}: {state(folder)}.")
    missing = [part for part in (CONFIG, STARTS, LOG, METRICS, FAILURES, END) if part not in files]
    if missing:
        report.notes.append(f"  Not there: {', '.join(missing)}.")
    earlier = sorted(path.name for path in folder.glob("config.*.toml"))[:MAX_CONFIGS]
    below = folders_in(folder / CHECKPOINTS) if CHECKPOINTS in folders_in(folder) else []
    manifests = [each for each in (f"{CHECKPOINTS}/{name}/{MANIFEST}" for name in below) if each in files][-MAX_MANIFESTS:]
    parts = {**dict.fromkeys((CONFIG, *earlier), _settings), **_TEXTS, **dict.fromkeys(manifests, _manifest)}
    for part, made in parts.items():
        if part in files:
            text = made(files, part)
            if part in files.refused:
                report.left_out(part, files.refused[part])
            elif text is None:
                report.left_out(part, f"which is no whole {part.rpartition('.')[2].upper()} file")
            else:
                report.add(prefix + part, text)
    if CHECKPOINTS in files and (folder / CHECKPOINTS).is_symlink():
        report.left_out(CHECKPOINTS, "which is a link, or no ordinary file")


def _rows(rows: Iterable[JSON]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _settings(files: RunFiles, part: str) -> str | None:
    return None if (found := files.toml(part)) is None else dump_toml(passed_on.settings(found))


def _manifest(files: RunFiles, part: str) -> str | None:
    return None if (found := files.json(part)) is None else json.dumps(clean_manifest(found), indent=1) + "\n"


def _end(files: RunFiles, part: str) -> str | None:
    return None if (found := files.json(part)) is None else json.dumps(clean_end(found), indent=1) + "\n"


_TEXTS: Mapping[str, Callable[[RunFiles, str], str | None]] = {
    STARTS: lambda files, part: _rows(map(clean_start, files.rows(part, ROWS))),
    LOG: lambda files, part: clean_log(files.lines(part, LOG_LINES)),
    METRICS: lambda files, part: _rows(metric_rows(files.rows(part, METRIC_LINES))),
    FAILURES: lambda files, part: _rows(map(clean_failure, files.rows(part, ROWS))),
    STACKS: lambda files, part: "".join(f"{line}\n" for line in passed_on.frames(files.lines(part, LOG_LINES))),
    END: _end,
}
"""Makers of the report's parts; one returns None if its part is incomplete."""


def state(folder: Path) -> str:
    """State of a folder: a run works in it or not."""
    try:
        return "nobody works in it" if owner_of(folder) is None else "it is running"
    except ValueError:
        return "whether it is running cannot be told"


def write_zip(path: Path, members: dict[str, str]) -> None:
    """Write a zip file of texts, whole or not at all.

    Raises:
        ValueError: if the file is there already or cannot be written.
    """
    try:
        file = open(path, "xb")  # noqa: SIM115 (closed below, on both ways)
    except FileExistsError:
        raise ValueError(f"{path} exists already; remove it, or choose another file with --output") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; choose another file with --output") from error
    try:
        with file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in members.items():
                archive.writestr(name, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ValueError(f"{path} cannot be written: {error.strerror}; choose another file with --output") from error
