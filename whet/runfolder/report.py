"""`whet report`: what a maintainer needs of a run, in a zip file, without data and without secrets."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from whet.config import dump_toml
from whet.runfolder.contents import (
    LOG_LINES,
    METRIC_LINES,
    clean_end,
    clean_failure,
    clean_log,
    clean_manifest,
    clean_start,
    listing,
    metric_rows,
    read_json,
    read_toml,
)
from whet.runfolder.environment import environment
from whet.runfolder.journal import END, FAILURES, LOG, STARTS, read_rows
from whet.runfolder.lock import LOCK, owner_of
from whet.runfolder.redact import Redactor
from whet.types import JSON

CONFIG = "config.toml"
METRICS = "metrics.jsonl"
STACKS = "stacks.txt"
MANIFESTS = "checkpoints/*/manifest.json"
README = "README.txt"
LISTING = "files.txt"
ENVIRONMENT = "environment.json"

_PARTS = {
    f"{CONFIG}, config.<n>.toml": "the settings of the last start, and of earlier ones that differed",
    STARTS: "when and with which command it was started, and the environment then",
    LOG: f"what the run said: the last {LOG_LINES} lines",
    METRICS: f"the numbers of the last {METRIC_LINES} lines",
    FAILURES: "the first failure of each kind and place: its type and its frames",
    END: "how the last start ended; there is none if it is running or was killed",
    STACKS: "where every thread was, if something took too long",
    MANIFESTS: "what each checkpoint consists of, without its state",
    ENVIRONMENT: "the machine that made this report, at that time",
    LISTING: "every file of the folder, with its size in bytes and its date",
}
_README = """Report of {name}, made by `whet report`.

{notes}

What is in it (several runs lie in folders of their own):
{parts}

What is not in it: data files, rollouts, prompts and replies, weights, kept batches{left_out}.
<secret> stands for what is called, or looks like, a secret; ~ and <user> for the user's home folder and name.
No program knows every secret: look through the files before you give them away.

How to look at it: every file is text; a .jsonl file has a JSON object in each line. Begin with end.json, failures.jsonl
and the end of log.txt. Times in JSON are seconds since the epoch.
"""


@dataclass(slots=True)
class Report:
    """The members of the zip file, and what its README.txt says of them."""

    redactor: Redactor
    messages: bool
    """Keep what exceptions say."""
    members: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        self.members[self.redactor.shapes(name)] = text

    def add_json(self, name: str, tree: JSON) -> None:
        self.add(name, json.dumps(tree, indent=1) + "\n")

    def add_rows(self, name: str, rows: Sequence[JSON]) -> None:
        self.add(name, "".join(json.dumps(row) + "\n" for row in rows))

    def note(self, text: str) -> None:
        self.notes.append(self.redactor.shapes(text))


def write_report(run: Path, output: Path | None = None, *, messages: bool = False) -> Path:
    """Pack a run's report. The run may be running, and the folder may hold several runs.

    Args:
        run: the run's folder (its run_dir).
        output: the zip file; None: `<name of the run>-report.zip` in the current folder.
        messages: keep the messages of exceptions, which may quote prompts and replies.

    Returns:
        The zip file.

    Raises:
        ValueError: if the folder holds no run, or the file is there already or cannot be written.
    """
    runs = find_runs(run)
    name = run.resolve().name
    target = output or Path(f"{name}-report.zip")
    report = Report(Redactor.of_process(), messages)
    for folder in runs:
        learn_secrets(report.redactor, folder)
    for folder in runs:
        add_run(report, folder, folder.relative_to(run).as_posix())
    report.add(LISTING, listing(run, report.redactor))
    report.add_json(ENVIRONMENT, report.redactor.tree(environment()))
    left_out = "" if messages else ", the messages of exceptions (--messages keeps them)"
    parts = "\n".join(f"  {part:<28} {what}" for part, what in _PARTS.items())
    shown = report.redactor.shapes(name)
    report.add(README, _README.format(name=shown, notes="\n".join(report.notes), parts=parts, left_out=left_out))
    write_zip(target, report.members)
    return target


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, and the runs in the two levels below it (as a quickstart has them).

    Raises:
        ValueError: if there is none.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; whet report takes the folder of a run (its run_dir)")
    below = sorted(path for pattern in ("*", "*/*") for path in folder.glob(pattern) if path.is_dir())
    runs = [path for path in (folder, *below) if any((path / name).is_file() for name in (STARTS, METRICS))]
    if not runs and (folder / LOCK).is_file():
        runs = [folder]  # it ended before it could say anything
    if not runs:
        what = f"neither it nor a folder in it has a {STARTS} or {METRICS}"
        raise ValueError(f"{folder} is not the folder of a run: {what}; whet report takes the folder of a run (its run_dir)")
    return runs


def learn_secrets(redactor: Redactor, folder: Path) -> None:
    """Learn the secrets of a run's settings and commands, so that they are found in its other files, too."""
    for path in configs(folder):
        redactor.learn_tree(read_toml(path))
    commands = [row.get("command") for row in read_rows(folder / STARTS)]
    commands.append((read_json(folder / END) or {}).get("resume_command"))
    for command in commands:
        if isinstance(command, str):
            redactor.learn_command(command)


def configs(folder: Path) -> list[Path]:
    """A run's settings, those of the last start first."""
    return [path for path in (folder / CONFIG, *sorted(folder.glob("config.*.toml"))) if path.is_file()]


def add_run(report: Report, folder: Path, name: str) -> None:
    """Add a run's files, and note what is missing."""
    prefix = "" if name == "." else f"{name}/"
    report.note(f"{'The run' if name == '.' else name}: {state(folder)}.")
    missing = [part for part in (CONFIG, STARTS, LOG, METRICS, FAILURES, END) if not (folder / part).is_file()]
    if missing:
        report.note(f"  Not there: {', '.join(missing)}.")
    for path in configs(folder):
        settings = read_toml(path)
        if settings is None:
            report.note(f"  Left out: {path.name}, which is no whole TOML file.")
        else:
            report.add(prefix + path.name, dump_toml(report.redactor.tree(settings)))
    add_journal(report, folder, prefix)
    if (folder / METRICS).is_file():
        report.add_rows(prefix + METRICS, list(metric_rows(folder / METRICS, report.redactor)))
    if (folder / STACKS).is_file():
        report.add(prefix + STACKS, report.redactor.text((folder / STACKS).read_text(errors="replace")))
    for path in sorted(folder.glob(MANIFESTS)):
        manifest = read_json(path)
        if manifest is None:
            report.note(f"  Left out: {path.relative_to(folder).as_posix()}, which is no whole JSON file.")
        else:
            report.add_json(prefix + path.relative_to(folder).as_posix(), clean_manifest(manifest, report.redactor))


def add_journal(report: Report, folder: Path, prefix: str) -> None:
    """Add the parts of a run that hold words: starts, log, failures, end."""
    redactor, messages = report.redactor, report.messages
    if (folder / STARTS).is_file():
        report.add_rows(prefix + STARTS, [clean_start(row, redactor) for row in read_rows(folder / STARTS)])
    if (folder / LOG).is_file():
        report.add(prefix + LOG, clean_log(folder / LOG, redactor, messages=messages))
    if (folder / FAILURES).is_file():
        rows = read_rows(folder / FAILURES)
        report.add_rows(prefix + FAILURES, [clean_failure(row, redactor, messages=messages) for row in rows])
    if (folder / END).is_file():
        end = read_json(folder / END)
        if end is None:
            report.note(f"  Left out: {END}, which is no whole JSON file.")
        else:
            report.add_json(prefix + END, clean_end(end, redactor, messages=messages))


def state(folder: Path) -> str:
    """Whether somebody works in a folder now."""
    try:
        return "nobody works in it" if owner_of(folder) is None else "it is running"
    except ValueError as error:
        return f"whether it is running cannot be told ({error})"


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
