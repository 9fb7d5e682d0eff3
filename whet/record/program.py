"""An environment in which a program, written for OpenAI's or Anthropic's API and unchanged, plays the trajectory.

The program talks to a server of the run as if it were the provider's. Every model call that it makes is recorded with the tokens that were
sampled, and trains.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from whet.calls import keeper
from whet.config import resolve_callable
from whet.data.parsers import Parsed
from whet.env.base import Step
from whet.env.resources import per_run
from whet.env.rollout import TrajectoryRun
from whet.record.play import Ended, Endpoint, play_recorded
from whet.record.server import Recorder, open_recorder
from whet.record.session import Training
from whet.record.tree import Rule
from whet.types import JSON, Outcome, Task

Score = Literal["none", "exit", "file"]
OUTPUT_BYTES = 64 * 1024
"""Bytes at the end of a program's output that are kept."""
PASSED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE")
"""Variables of the environment that every program gets."""


AgentFunction = Callable[[Task, Endpoint], Awaitable[float | None]]
"""A program that is a function: plays a task with the model at an endpoint. What it returns is the score, if it is a number."""


class ProgramEnv:
    """The environment `program`.

    Args:
        command: the program and its arguments; `./NAME` is a file of the folder in which the run was started. It runs in a folder of its
            own with the prompt's last message on standard input. OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
            lead to the model, WHET_TASK names a JSON file with `id`, `prompt` and `metadata` of the task, WHET_SCORE a file that the
            program may write.
        function: in place of a command: import reference to `async (task, endpoint) -> score or None`.
        score: the last turn's reward from the environment. exit: 1 if the program ends with status 0, else 0; file: the number in the file
            that WHET_SCORE names; none: a reward function scores the trajectory.
        variables: names of further variables of the environment that the command gets.
        untrained_models: patterns of model names (`*haiku*`) whose calls do not train: titles, summaries of a small model.
        untrained_rules: rules whose calls do not train (docs/programs.md): extends, branch, rewritten, other.
        recorder: the run's server.

    Raises:
        ValueError: neither a command nor a function is given, or both; or a rule, or a file of the command, does not exist.
    """

    def __init__(
        self,
        command: list[str] | None = None,
        function: str | None = None,
        score: Score = "none",
        variables: Sequence[str] = (),
        untrained_models: Sequence[str] = (),
        untrained_rules: Sequence[str] = (),
        *,
        recorder: Recorder = per_run(open_recorder),
    ) -> None:
        if (command is None) == (function is None) or command == []:
            raise ValueError("the environment program needs a command (a list of texts) or a function, one of them, in env.options")
        if score not in ("none", "exit", "file"):
            raise ValueError(f"score is none, exit or file, not {score!r}")
        if unknown := sorted(set(untrained_rules) - {*Rule}):
            raise ValueError(f"there is no rule {unknown[0]!r}: rules of calls are {', '.join(Rule)}")
        self._command = None if command is None else [_placed(part) for part in command]
        self._score, self._variables, self._recorder = score, tuple(variables), recorder
        self._function: AgentFunction | None = None
        if function is not None:
            self._function = resolve_callable(function, kind="program", given=["task", "endpoint"])
        self._training = Training(tuple(untrained_models), tuple(untrained_rules))

    tools: Sequence[Mapping[str, JSON]] = ()

    async def start(self, task: Task) -> Task:
        return task

    async def step(self, reply: Parsed) -> Step:
        raise AssertionError("a program takes no turns: it plays by itself")

    async def close(self) -> None:
        pass

    async def play(self, run: TrajectoryRun) -> Outcome:
        return await play_recorded(run, self._recorder, self._training, self._program)

    async def _program(self, task: Task, endpoint: Endpoint) -> Ended:
        if self._function is not None:
            found = await self._function(task, endpoint)
            if found is not None and (isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found)):
                raise ValueError(f"the program's function returned {found!r}: return a finite number, the score, or None")
            return Ended(None if found is None else float(found))
        assert self._command is not None
        with tempfile.TemporaryDirectory(prefix="whet-program-") as folder:
            return await self._run_command(self._command, Path(folder), task, endpoint)

    async def _run_command(self, command: Sequence[str], folder: Path, task: Task, endpoint: Endpoint) -> Ended:
        prompt = task.prompt if isinstance(task.prompt, str) else [message.to_dict() for message in task.prompt]
        given, scored, work = folder / "task.json", folder / "score", folder / "work"
        work.mkdir()
        given.write_text(json.dumps({"id": task.id, "prompt": prompt, "metadata": dict(task.metadata)}, ensure_ascii=False))
        environment = {
            **{name: value for name in (*PASSED, *self._variables) if (value := os.environ.get(name)) is not None},
            **{"HOME": str(work), "TMPDIR": str(work), "WHET_TASK": str(given), "WHET_SCORE": str(scored)},
            **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), endpoint.openai_url),
            **{"ANTHROPIC_BASE_URL": endpoint.url, "NO_PROXY": "127.0.0.1"},
            **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"), endpoint.key),
        }
        asked = task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content
        status, out, errors = await _run(command, work, environment, asked.encode())
        tail = {"exit": status, "stdout": out, "stderr": errors}
        if self._score == "exit":
            return Ended(float(status == 0), tail)
        if status != 0:
            raise RuntimeError(f"the program {command[0]} ended with status {status}: {errors[-800:] or out[-800:] or 'it wrote nothing'}")
        return Ended(_score_in(scored) if self._score == "file" else None, tail)


def _placed(part: str) -> str:
    """A part of a command: its file, where it begins with `./`. The program's own folder, which is empty, cannot be meant.

    Raises:
        ValueError: there is no such file.
    """
    if not part.startswith("./"):
        return part
    path = Path(part).absolute()
    if not path.exists():
        raise ValueError(f"there is no file {part} in {Path.cwd()} (env.options.command)")
    return str(path)


def _score_in(file: Path) -> float:
    """The number in a program's file.

    Raises:
        ValueError: there is none, or it is not finite.
    """
    if file.is_symlink() or not file.is_file():
        raise ValueError("the program wrote no score: env.options.score is file, and WHET_SCORE names the file to write a number into")
    with file.open() as opened:
        text = opened.read(100)
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"the program's score must be a finite number, not {text[:40]!r}")
    return score


async def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str], given: bytes) -> tuple[int, str, str]:
    """Run a command to its end: its status, and the ends of what it wrote. A keeper ends all that it started with it."""
    if shutil.which(command[0], path=environment.get("PATH")) is None:
        raise ValueError(f"there is no program {command[0]!r} (env.options.command)")
    kept = [sys.executable, "-I", "-S", keeper.__file__, "-", *command]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*kept, **pipes, cwd=folder, env=dict(environment), start_new_session=True)
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    reading = [asyncio.ensure_future(_tail(pipe)) for pipe in (process.stdout, process.stderr)]
    try:
        process.stdin.write(given)
        with suppress(ConnectionError):  # it may read nothing
            await process.stdin.drain()
            process.stdin.close()
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


async def _tail(pipe: asyncio.StreamReader) -> str:
    kept = bytearray()
    while piece := await pipe.read(OUTPUT_BYTES):
        kept += piece
        del kept[:-OUTPUT_BYTES]
    return kept.decode(errors="replace")


