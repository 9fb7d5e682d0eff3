"""An environment in which a program, written for OpenAI's or Anthropic's API and unchanged, plays the trajectory.

The program talks to a server of the run as if it were the provider's. Every model call that it makes is recorded with the tokens that were
sampled, and trains.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, cast

from whet.config import ConfigError, resolve_callable
from whet.data.parsers import Parsed
from whet.env.base import Step
from whet.env.resources import Resource
from whet.env.rollout import TrajectoryRun
from whet.env.sandbox.config import SandboxConfig
from whet.record.command import CommandEnd, ProgramPlace, isolated_place, placed, run_inside, run_outside, score_of, unisolated_place
from whet.record.play import Ended, Endpoint, play_recorded
from whet.record.session import Training
from whet.record.tree import Rule
from whet.types import JSON, Outcome, Task

Score = Literal["none", "exit", "file"]
INSIDE = " (in the sandbox: env.sandbox.paths names what else it may read)"


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
        sandbox: the command runs in a sandbox with the limits of `env.sandbox`: it reaches the model alone, reads what it needs to run and
            `env.sandbox.paths`, and writes into its folder. False: with the rights of the run's user. Left out: true for a command.
        untrained_models: patterns of model names (`*haiku*`) whose calls do not train: titles, summaries of a small model.
        untrained_rules: rules whose calls do not train (docs/programs.md): extends, branch, rewritten, other.
        place: the run's server, and the sandbox of this trajectory's command.

    Raises:
        ValueError: neither a command nor a function is given, or both; a rule, or a file of the command, does not exist; or a function is
            to run in a sandbox.
    """

    def __init__(
        self,
        command: list[str] | None = None,
        function: str | None = None,
        score: Score = "none",
        variables: Sequence[str] = (),
        untrained_models: Sequence[str] = (),
        untrained_rules: Sequence[str] = (),
        sandbox: bool | None = None,
        *,
        place: ProgramPlace | None = None,
    ) -> None:
        if (command is None) == (function is None) or (command is not None and not _is_command(command)):
            raise ValueError("the environment program needs a command (a list of texts) or a function, one of them, in env.options")
        if score not in ("none", "exit", "file"):
            raise ValueError(f"score is none, exit or file, not {score!r}")
        if unknown := sorted(set(untrained_rules) - {*Rule}):
            raise ValueError(f"there is no rule {unknown[0]!r}: rules of calls are {', '.join(Rule)}")
        if sandbox not in (None, True, False) or (sandbox and command is None):
            raise ValueError(f"sandbox is true or false, and a function runs in the run's own process, without one; not {sandbox!r}")
        self._command = None if command is None else placed(command)
        self._score, self._variables, self._place = score, tuple(variables), place
        self._isolated = command is not None and sandbox is not False
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
        assert self._place is not None, "programs that play have a place"
        return await play_recorded(run, self._place.recorder, self._training, self._program)

    async def _program(self, task: Task, endpoint: Endpoint) -> Ended:
        if self._function is not None:
            found = await self._function(task, endpoint)
            if found is not None and (isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found)):
                raise ValueError(f"the program's function returned {found!r}: return a finite number, the score, or None")
            return Ended(None if found is None else float(found))
        assert self._command is not None and self._place is not None
        inside = self._place.inside
        assert (inside is not None) == self._isolated, "a program that is to run in a sandbox has one"
        if inside is not None:
            return self._ended(await run_inside(inside, self._variables, task, endpoint))
        return self._ended(await run_outside(self._command, self._variables, task, endpoint))

    def _ended(self, end: CommandEnd) -> Ended:
        tail = {"exit": end.status, "stdout": end.stdout, "stderr": end.stderr}
        if self._score == "exit":
            return Ended(float(end.status == 0), tail)
        if end.status != 0:
            assert self._command is not None
            words = end.stderr[-800:] or end.stdout[-800:] or "it wrote nothing"
            raise RuntimeError(f"the program {self._command[0]} ended with status {end.status}{INSIDE * self._isolated}: {words}")
        return Ended(score_of(end) if self._score == "file" else None, tail)


def _is_command(command: object) -> bool:
    return isinstance(command, list) and bool(command) and all(isinstance(word, str) for word in cast(list[object], command))


def program_needs(options: Mapping[str, Any], sandbox: SandboxConfig) -> dict[str, Resource]:
    """Resources of the environment: the recorder, and the sandbox of a command unless its options want none.

    Raises:
        ValueError: nothing on this machine isolates as it must, or there is no such program.
    """
    command = options.get("command")
    if options.get("sandbox", True) is False or not _is_command(command):
        return {"place": unisolated_place()}
    try:
        return {"place": isolated_place(placed(cast(list[str], command)), options.get("variables", ()), sandbox)}
    except ValueError as error:
        way_out = "env.options.sandbox=false runs the program without isolation, with all your rights"
        raise ConfigError([f"the environment program (env.options.command): {error}; {way_out}"]) from error
