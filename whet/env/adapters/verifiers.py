"""Environments of the package verifiers: a bridge in a virtual environment of their own plays episodes against an endpoint of chat
completions, and reports their rewards."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whet.calls import keeper
from whet.data.generated import TaskList
from whet.runfolder.child_environment import child_environment
from whet.types import JSON, Message, Task

BRIDGE = Path(__file__).with_name("verifiers_bridge.py")
MAX_LINE_BYTES = 1 << 26
START_TIMEOUT_S = 300.0
"""For the bridge to import its package, load the taskset and start what serves it."""
LAST_WORDS_BYTES, LAST_WORDS_S = 4096, 5.0
"""End of what the bridge writes to its errors, and the time that it is waited for."""
INDEX = "verifiers"
"""Key of a task's metadata: its number in the taskset."""


class EpisodeFailed(Exception):
    """An episode ended without a reward: the environment, its harness or the bridge failed."""


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode that ended well."""

    reward: float
    """Sum over its traces."""
    metrics: Mapping[str, float]
    """The parts of the reward, and what else was measured."""
    num_turns: int


@dataclass(slots=True)
class VerifiersBridge:
    """A running bridge. It plays several episodes at a time."""

    process: asyncio.subprocess.Process
    waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict[int, "asyncio.Future[dict[str, Any]]"])
    last_words: bytearray = field(default_factory=bytearray)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    hearing: asyncio.Task[None] | None = None
    """Reads what the bridge writes to its errors."""
    lost: Exception | None = None
    """Why no further episode can be played."""

    async def episode(self, task: Task, base_url: str, key: str, model: str, sampling: Mapping[str, JSON] | None = None) -> Episode:
        """Play an episode of a task.

        Args:
            task: from `verifiers_source`.
            base_url: address of an endpoint of chat completions, up to `/v1`, that records what the model samples.
            key: the endpoint's key for this trajectory.
            model: name of the model in requests.
            sampling: sampling that requests ask for.

        Raises:
            EpisodeFailed: it has no reward, and why.
        """
        if self.lost is not None:
            raise self.lost
        number = next(self.numbers)
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        index = str(task.metadata[INDEX])
        try:
            settings = {"base_url": base_url, "key": key, "model": model, "sampling": dict(sampling or {})}
            self._tell({"do": "run", "number": number, "index": index, **settings})
            found = await answer
        except asyncio.CancelledError:
            self._tell({"do": "cancel", "number": number})
            raise
        finally:
            del self.waiting[number]
        if found.get("failed") or found["errors"] or found["reward"] is None:
            why = found.get("failed") or "; ".join(found["errors"]) or "it has no reward"
            raise EpisodeFailed(f"the verifiers episode of {task.origin or task.id} failed: {why}")
        return Episode(found["reward"], found["metrics"], found["num_turns"])

    async def tasks(self) -> list[dict[str, Any]]:
        """The taskset's rows. Called before any episode."""
        self._tell({"do": "tasks"})
        return (await self._line())["tasks"]

    def _tell(self, command: Mapping[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            if self.hearing is not None:
                await asyncio.wait({self.hearing}, timeout=LAST_WORDS_S)
            raise EpisodeFailed(f"the bridge to verifiers ended; its last words: {self.last_words.decode(errors='replace').strip()}")
        return json.loads(line)

    async def read(self) -> None:
        """Hand answers to those that wait for them, until the bridge ends."""
        try:
            while True:
                answer = await self._line()
                if (waiting := self.waiting.get(answer["number"])) is not None and not waiting.done():
                    waiting.set_result(answer)
        except Exception as error:  # of another process: every episode that waits ends with it
            self.lost = error
            for waiting in self.waiting.values():
                if not waiting.done():
                    waiting.set_exception(error)

    async def hear(self) -> None:
        """Keep the end of what the bridge writes to its errors."""
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(65536):
            self.last_words += data
            del self.last_words[:-LAST_WORDS_BYTES]


def settings_of(taskset: str | Mapping[str, JSON], harness: str, agent: Mapping[str, JSON] | None) -> dict[str, Any]:
    """An environment's settings in verifiers' terms."""
    whole = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
    return {"taskset": whole, "agent": {"harness": {"id": harness}, "runtime": {"type": "subprocess"}, **dict(agent or {})}}


@asynccontextmanager
async def open_bridge(python: str, settings: Mapping[str, Any], folder: str = ".") -> AsyncIterator[VerifiersBridge]:
    """A bridge that has loaded its environment. All that it started ends with it.

    Args:
        python: the interpreter of the virtual environment that has verifiers.
        settings: the environment's (`settings_of`).
        folder: where the bridge runs, and looks for tasksets of yours.

    Raises:
        EpisodeFailed: it could not be started.
    """
    command = [sys.executable, "-I", "-S", keeper.__file__, "-", python, str(BRIDGE), json.dumps(settings)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(
        *command, **pipes, cwd=folder, env=child_environment(), limit=MAX_LINE_BYTES, start_new_session=True
    )
    bridge = VerifiersBridge(process)
    bridge.hearing = asyncio.create_task(bridge.hear())
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await bridge._line()
        yield bridge
    finally:
        if process.returncode is None:
            process.terminate()  # its keeper ends all that it started
        await process.wait()
        await bridge.hearing


@asynccontextmanager
async def open_reading_bridge(python: str, settings: Mapping[str, Any], folder: str = ".") -> AsyncIterator[VerifiersBridge]:
    """A bridge whose episodes may be played."""
    async with open_bridge(python, settings, folder) as bridge:
        reading = asyncio.create_task(bridge.read())
        try:
            yield bridge
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def verifiers_source(
    seed: int,
    python: str,
    taskset: str | dict[str, Any],
    harness: str = "null",
    agent: dict[str, Any] | None = None,
    folder: str = ".",
) -> TaskList:
    """The tasks of a taskset of verifiers, by their numbers in it.

    Args:
        seed: seed of the order.
        python: the interpreter of the virtual environment that has verifiers.
        taskset: its id, or a table with the `id` and its settings.
        harness: the program that plays; `null` talks to the model alone.
        agent: further settings of the agent.
        folder: where the bridge looks for tasksets of yours.
    """

    async def rows() -> list[dict[str, Any]]:
        async with open_bridge(python, settings_of(taskset, harness, agent), folder) as bridge:
            return await bridge.tasks()

    return TaskList("verifiers", [_task(row) for row in asyncio.run(rows())], seed)


def _task(row: Mapping[str, Any]) -> Task:
    index, prompt = str(row["idx"]), row.get("prompt")
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    label = None if row.get("answer") is None else str(row["answer"])
    return Task(f"verifiers/{index}", (Message("user", text),), label, {INDEX: index}, origin=f"taskset:{index}")
