"""One run of a program's command, in a sandbox or with the rights of this process."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from whet.calls import keeper
from whet.env.resources import Resource, per_run, per_trajectory
from whet.env.sandbox.base import REASONS, PathRefused
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.local import LocalSandbox
from whet.env.sandbox.open import for_command, isolating, open_local
from whet.record.play import Endpoint
from whet.record.server import Recorder, open_recorder
from whet.types import JSON, Task

OUTPUT_BYTES = 64 * 1024
"""Bytes at the end of a program's output that are kept."""
FLOOD_BYTES = 32 << 20
"""Output after which a program in a sandbox is ended."""
PASSED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables of the environment that every program gets."""
PASSED_OUTSIDE = ("SSL_CERT_FILE",)
"""Further ones of a program outside of a sandbox. Inside, the file is not there, and a client that is to read it fails."""
TASK, SCORE = ".whet/task.json", ".whet/score"
"""Files in a sandbox's folder."""
SCORE_CHARS = 100
LIMITS = {"memory": "memory_mb", "processes": "max_processes", "disk": "disk_mb"}
"""Settings of `env.sandbox` by the reason for which a program was ended."""


class ProgramEnded(RuntimeError):
    """A program took more than its sandbox allows, and was ended. The text says of what."""


class _Flood(Exception):
    """A program wrote more output than it may."""


@dataclass(frozen=True, slots=True)
class ProgramSandbox:
    """A sandbox for one run of a command."""

    sandbox: LocalSandbox
    command: tuple[str, ...]
    """With the full path of its program."""
    config: SandboxConfig


@dataclass(frozen=True, slots=True)
class ProgramPlace:
    """The place where a trajectory's program runs."""

    recorder: Recorder
    """The run's server."""
    inside: ProgramSandbox | None = None
    """None: it has the rights of this process."""


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """The end of a command."""

    status: int
    """Exit status, negative for a signal."""
    stdout: str
    """Its last part."""
    stderr: str
    score: str | None
    """Beginning of what it wrote into its file for the score; None: there is no such file."""


def passed(variables: Sequence[str]) -> dict[str, str]:
    """Variables of this process's environment that a program gets, those that are named included."""
    return {name: value for name in (*PASSED, *variables) if (value := os.environ.get(name)) is not None}


def placed(command: Sequence[str]) -> list[str]:
    """A command whose parts that begin with `./` are files of the folder where the run was started: the program's own folder is empty.

    Raises:
        ValueError: there is no such file.
    """
    return [_file(part) if part.startswith("./") else part for part in command]


def _file(part: str) -> str:
    path = Path(part).absolute()
    if not path.exists():
        raise ValueError(f"there is no file {part} in {Path.cwd()} (env.options.command)")
    return str(path)


@asynccontextmanager
async def _program_place(recorder: Recorder = per_run(open_recorder)) -> AsyncIterator[ProgramPlace]:
    yield ProgramPlace(recorder)


def unisolated_place() -> Resource:
    """The resource of a run that is the place of programs with the rights of this process."""
    return cast(Resource, per_run(_program_place))


def isolated_place(command: Sequence[str], variables: Sequence[str], config: SandboxConfig) -> Resource:
    """The resource of a trajectory that opens the sandbox of its program: it reaches the recorder, reads what the command needs and
    `env.sandbox.paths`, and writes into its folder.

    Raises:
        ValueError: nothing on this machine isolates as it must, or there is no such program.
    """
    whole, paths = for_command(config, command, passed(variables), network=True)

    @asynccontextmanager
    async def program_sandbox(task: Task, recorder: Recorder = per_run(open_recorder)) -> AsyncIterator[ProgramPlace]:
        async with open_local(config, paths=paths, loopback=recorder.place) as sandbox:
            yield ProgramPlace(recorder, ProgramSandbox(sandbox, whole, config))

    return cast(Resource, per_trajectory(isolating(program_sandbox, config)))


async def run_inside(room: ProgramSandbox, variables: Sequence[str], task: Task, endpoint: Endpoint) -> CommandEnd:
    """Run the command in its sandbox.

    Raises:
        ProgramEnded: it took too much memory, processes, disk or output.
        SandboxFailed: the sandbox failed, and not the command.
    """
    sandbox = room.sandbox
    await sandbox.write(TASK, _given(task))
    environment = {
        **passed(variables),
        **{"WHET_TASK": f"{sandbox.folder}/{TASK}", "WHET_SCORE": f"{sandbox.folder}/{SCORE}"},
        **_reaches(endpoint),
    }
    program = await sandbox.spawn(room.command, environment)
    feeding = asyncio.ensure_future(_feed(program.stdin, task))
    reading = [asyncio.ensure_future(_tail(pipe, FLOOD_BYTES)) for pipe in (program.stdout, program.stderr)]
    try:
        done, _ = await asyncio.wait({program.ended, *reading}, return_when=asyncio.FIRST_EXCEPTION)
        for one in done:
            one.result()  # the first that failed: the others may never end
        out, errors, ended = reading[0].result(), reading[1].result(), program.ended.result()
    except _Flood as flood:
        raise ProgramEnded(f"the program {room.command[0]}: {REASONS['output']}, over {FLOOD_BYTES >> 20} MiB") from flood
    finally:
        for one in (feeding, *reading):
            one.cancel()
        await program.close()
        await asyncio.gather(feeding, *reading, return_exceptions=True)
    if ended.status is None:
        key = LIMITS[ended.reason]
        limit = f"env.sandbox.{key} = {getattr(room.config, key)}"
        raise ProgramEnded(f"the program {room.command[0]}: {REASONS[ended.reason]} ({limit})")
    return CommandEnd(ended.status, out, errors, await _scored(sandbox))


async def run_outside(command: Sequence[str], variables: Sequence[str], task: Task, endpoint: Endpoint) -> CommandEnd:
    """Run the command with the rights of this process, in a folder of its own. A keeper ends all that it started with it."""
    with tempfile.TemporaryDirectory(prefix="whet-program-") as name:
        folder = Path(name)
        given, scored, work = folder / "task.json", folder / "score", folder / "work"
        work.mkdir()
        given.write_bytes(_given(task))
        environment = {
            **passed((*PASSED_OUTSIDE, *variables)),
            **{"HOME": str(work), "TMPDIR": str(work), "WHET_TASK": str(given), "WHET_SCORE": str(scored)},
            **_reaches(endpoint),
        }
        status, out, errors = await _kept(command, work, environment, task)
        score = None
        if scored.is_file() and not scored.is_symlink():
            with scored.open(errors="replace") as opened:
                score = opened.read(SCORE_CHARS)
        return CommandEnd(status, out, errors, score)


def score_of(end: CommandEnd) -> float:
    """The number in a program's file.

    Raises:
        ValueError: there is none, or it is not finite.
    """
    if end.score is None:
        raise ValueError("the program wrote no score: env.options.score is file, and WHET_SCORE names the file to write a number into")
    try:
        score = float(end.score)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"the program's score must be a finite number, not {end.score[:40]!r}")
    return score


def _given(task: Task) -> bytes:
    """A task as a program reads it."""
    prompt: JSON = task.prompt if isinstance(task.prompt, str) else [message.to_dict() for message in task.prompt]
    return json.dumps({"id": task.id, "prompt": prompt, "metadata": dict(task.metadata)}, ensure_ascii=False).encode()


def _reaches(endpoint: Endpoint) -> dict[str, str]:
    """Variables by which a program reaches the model."""
    return {
        **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), endpoint.openai_url),
        **{"ANTHROPIC_BASE_URL": endpoint.url, "NO_PROXY": "127.0.0.1"},
        **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"), endpoint.key),
    }


async def _scored(sandbox: LocalSandbox) -> str | None:
    try:
        return (await sandbox.read(SCORE))[:SCORE_CHARS].decode(errors="replace")
    except PathRefused:
        return None


async def _kept(command: Sequence[str], folder: Path, environment: Mapping[str, str], task: Task) -> tuple[int, str, str]:
    """Run a command to its end: its status, and the ends of what it wrote."""
    kept = [sys.executable, "-I", "-S", keeper.__file__, "-", *command]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*kept, **pipes, cwd=folder, env=dict(environment), start_new_session=True)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    reading = [asyncio.ensure_future(_tail(pipe)) for pipe in (process.stdout, process.stderr)]
    try:
        await _feed(process.stdin, task)
        status = await process.wait()
        out, errors = await asyncio.gather(*reading)
    finally:
        if process.returncode is None:
            process.terminate()  # its keeper ends all that it started
            await process.wait()
        for one in reading:
            one.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    return status, out, errors


async def _feed(pipe: asyncio.StreamWriter, task: Task) -> None:
    """Write the prompt's last message, and close."""
    asked = task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content
    pipe.write(asked.encode())
    with suppress(ConnectionError):  # it may read nothing
        await pipe.drain()
        pipe.close()


async def _tail(pipe: asyncio.StreamReader, most: int | None = None) -> str:
    """The end of an output.

    Raises:
        _Flood: it has more than `most` bytes.
    """
    kept, seen = bytearray(), 0
    while piece := await pipe.read(OUTPUT_BYTES):
        seen += len(piece)
        if most is not None and seen > most:
            raise _Flood
        kept += piece
        del kept[:-OUTPUT_BYTES]
    return kept.decode(errors="replace")
