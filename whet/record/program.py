"""An environment in which a program, written for OpenAI's or Anthropic's API and unchanged, plays the trajectory.

The program talks to a server of the run as if it were the provider's. Every model call that it makes is recorded with the tokens that were
sampled, and trains.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from whet.config import resolve_callable
from whet.data.parsers import Parsed
from whet.engine.base import EngineFailed
from whet.engine.embedded.grammar import Grammars
from whet.env.base import Step
from whet.env.resources import per_run
from whet.env.rollout import Aborted, TrajectoryRun, turn_seed
from whet.record.server import Recorder, open_recorder
from whet.record.session import Session, Training
from whet.record.tree import Rule
from whet.serve.errors import ApiError
from whet.serve.service import Service
from whet.serve.settings import ServeConfig, ServerLimits
from whet.types import JSON, Chunk, Finish, Outcome, Request, Task, Turn, TurnNote

Score = Literal["none", "exit", "file"]
OUTPUT_BYTES = 64 * 1024
"""Bytes at the end of a program's output that are kept."""
END_GRACE_S = 5.0
"""Seconds for a program's processes to end after they were killed."""
PASSED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE")
"""Variables of the environment that every program gets."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The model's address for one trajectory's program."""

    url: str
    """`http://127.0.0.1:PORT/s/KEY`, for Anthropic's clients; OpenAI's take `openai_url`."""
    key: str

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"


AgentFunction = Callable[[Task, Endpoint], Awaitable[float | None]]
"""A program that is a function: plays a task with the model at an endpoint. What it returns is the score, if it is a number."""


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a program."""

    score: float | None
    attachments: Mapping[str, JSON]


class ProgramEnv:
    """The environment `program`.

    Args:
        command: the program and its arguments. It runs in a folder of its own with the prompt's last message on standard input; the
            variables OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY lead to the model, WHET_TASK names a JSON
            file with `id`, `prompt` and `metadata` of the task, WHET_SCORE a file that the program may write.
        function: in place of a command: import reference to `async (task, endpoint) -> score or None`.
        score: the last turn's reward from the environment. exit: 1 if the program ends with status 0, else 0; file: the number in the file
            that WHET_SCORE names; none: a reward function scores the trajectory.
        variables: names of further variables of the environment that the command gets.
        untrained_models: patterns of model names (`*haiku*`) whose calls do not train: titles, summaries of a small model.
        untrained_rules: rules whose calls do not train (docs/programs.md): extends, branch, rewritten, other.
        recorder: the run's server.

    Raises:
        ValueError: neither a command nor a function is given, or both; or a rule does not exist.
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
        self._command, self._score, self._variables, self._recorder = command, score, tuple(variables), recorder
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
        """Let the program play, and keep its calls as the trajectory's turns."""
        if run.engine.capabilities.deterministic:
            raise ValueError("the environment program cannot play with deterministic = true: when a program calls depends on the clock")
        calls = _Calls(run)
        session = Session(run.renderer, calls.stream, self._training, nucleus=run.sampling.nucleus)
        session.service = _service(run, session, self._recorder)
        try:
            with self._recorder.opened(session) as key:
                ended = await self._played(run, calls, Endpoint(f"{self._recorder.address}/s/{key}", key))
        finally:
            await session.close()
            run.turns[:] = session.turns()
            run.counts.update({f"calls_{rule}": sum(call.spec.rule is rule for call in session.tree.calls) for rule in Rule})
            run.counts["calls_untrained"] += sum(not call.spec.trained for call in session.tree.calls)
            run.counts["calls_retried"] += session.num_retries
        if not run.turns:
            where = "does it use the address in OPENAI_BASE_URL or ANTHROPIC_BASE_URL?"
            raise ValueError(f"the program ended without a model call that trains: {where}")
        run.turns[-1] = _noted(run.turns[-1], ended)
        return Outcome.TRUNCATED if calls.cut else Outcome.COMPLETED

    async def _played(self, run: TrajectoryRun, calls: _Calls, endpoint: Endpoint) -> Ended:
        working = asyncio.ensure_future(self._program(run.task, endpoint))
        stopped = asyncio.ensure_future(calls.stopped.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if calls.failure is not None:
                run.place = "engine"
                raise calls.failure
            if calls.stopped.is_set():
                raise Aborted(run.id)
            return working.result()
        finally:
            for task in (working, stopped):
                task.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)

    async def _program(self, task: Task, endpoint: Endpoint) -> Ended:
        if self._function is not None:
            found = await self._function(task, endpoint)
            if found is not None and (isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found)):
                raise ValueError(f"the program's function returned {found!r}: return a finite number, the score, or None")
            return Ended(None if found is None else float(found), {})
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


class _Calls:
    """The model calls of one program, sampled as the run samples."""

    def __init__(self, run: TrajectoryRun) -> None:
        self._run = run
        self.cut = False
        """A limit of the run refused a call."""
        self.stopped = asyncio.Event()
        """The engine was asked to stop, or failed: nothing is sampled any more."""
        self.failure: Exception | None = None

    async def stream(self, request: Request, number: int) -> AsyncIterator[Chunk]:
        run, limits = self._run, self._run.limits
        room = min(limits.max_turn_tokens, limits.max_tokens - len(request.tokens))
        if number >= limits.max_turns or room < 1:
            self.cut = True
            which = f"rollout.max_turns = {limits.max_turns}" if number >= limits.max_turns else f"rollout.max_tokens = {limits.max_tokens}"
            raise ApiError(400, f"the trajectory is at its limit ({which})", code="context_length_exceeded")
        asked = request.sampling
        sampling = replace(
            run.sampling,
            max_tokens=min(asked.max_tokens, room),
            stop=tuple(dict.fromkeys((*run.sampling.stop, *asked.stop))),
            grammar=asked.grammar or run.sampling.grammar,
            logit_bias=asked.logit_bias,
            raw_logprobs=asked.raw_logprobs,
            top_logprobs=asked.top_logprobs,
            seed=turn_seed(run.sampling.seed, number),
        )
        run.request = request.id
        began = time.monotonic()
        try:
            mine = replace(request, sampling=sampling, conversation=run.id, rank=run.rank)
            async with aclosing(_generator(run.engine.generate(mine))) as chunks:
                async for chunk in chunks:
                    if chunk.finish is Finish.ABORT:
                        self.stopped.set()
                    yield chunk
        except EngineFailed as error:
            self.failure = self.failure or error
            self.stopped.set()
            raise
        finally:
            run.charge("engine", began)


def _generator(stream: AsyncIterator[Chunk]) -> Any:
    return stream


def _service(run: TrajectoryRun, session: Session, recorder: Recorder) -> Service:
    limits = ServerLimits(max_running=256, max_samples=64)
    return Service(
        engine=run.engine,
        renderer=run.renderer,
        config=ServeConfig.model_validate({"model": {"path": "policy"}, "limits": limits.model_dump(), "stream_interval": 2**30}),
        texts=recorder.texts,
        load=_loads_nothing,
        try_grammar=Grammars(run.renderer, len(run.renderer.tokenizer)).check,
        prompts=session,
        generate=session.generate,
        any_model=True,
    )


def _loads_nothing(source: object) -> Any:
    raise AssertionError("a session changes no weights")


def _noted(turn: Turn, ended: Ended) -> Turn:
    notes = (*turn.notes, TurnNote("", {}, ended.attachments)) if ended.attachments else turn.notes
    return replace(turn, reward=turn.reward if ended.score is None else ended.score, notes=notes)


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
    """Run a command to its end: its status, and the ends of what it wrote. All its processes are ended with it."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder,
            env=dict(environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise ValueError(f"the program {command[0]!r} cannot be started: {error.strerror} (env.options.command)") from error
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    async with _ended(process):
        process.stdin.write(given)
        reading = [asyncio.ensure_future(_tail(pipe)) for pipe in (process.stdout, process.stderr)]
        try:
            with suppress(ConnectionError):  # it may read nothing
                await process.stdin.drain()
                process.stdin.close()
            status = await process.wait()
            await asyncio.wait(reading, timeout=1.0)  # a child that lives on may hold the pipes
            out, errors = (one.result() if one.done() else "" for one in reading)
        finally:
            for one in reading:
                one.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
    return status, out, errors


@asynccontextmanager
async def _ended(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            async with asyncio.timeout(END_GRACE_S):
                await process.wait()


async def _tail(pipe: asyncio.StreamReader) -> str:
    kept = bytearray()
    while piece := await pipe.read(OUTPUT_BYTES):
        kept += piece
        del kept[:-OUTPUT_BYTES]
    return kept.decode(errors="replace")


