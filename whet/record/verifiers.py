"""The environment `verifiers`: a task of the package verifiers, played by its own harness against a recording endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from whet.data.parsers import Parsed
from whet.env.adapters.verifiers import VerifiersBridge, open_reading_bridge, settings_of
from whet.env.base import Step
from whet.env.resources import per_run
from whet.env.rollout import TrajectoryRun
from whet.record.play import Ended, Endpoint, play_recorded
from whet.record.server import Recorder, open_recorder
from whet.record.session import Training
from whet.types import JSON, Outcome, Task


class Bridges:
    """The bridges of a run, one for each kind of environment, opened when first needed.

    Args:
        stack: closes them.
    """

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._lock = asyncio.Lock()
        self._open: dict[str, VerifiersBridge] = {}

    async def get(self, python: str, settings: Mapping[str, Any], folder: str) -> VerifiersBridge:
        """The bridge of an environment.

        Raises:
            EpisodeFailed: it could not be started.
        """
        key = json.dumps([python, settings, folder], sort_keys=True)
        async with self._lock:
            bridge = self._open.get(key)
            if bridge is None or bridge.lost is not None:
                bridge = self._open[key] = await self._stack.enter_async_context(open_reading_bridge(python, settings, folder))
        return bridge


@asynccontextmanager
async def open_bridges() -> AsyncIterator[Bridges]:
    """Bridges that end with the run."""
    async with AsyncExitStack() as stack:
        yield Bridges(stack)


class VerifiersEnv:
    """An environment of verifiers, unchanged. Its tasks are those of `data.source = "verifiers"` with the same options; its reward is
    `reward.name = "environment"`.

    Args:
        python: the interpreter of the virtual environment that has verifiers.
        taskset: its id, or a table with the `id` and its settings.
        harness: the program that plays; `null` talks to the model alone.
        agent: further settings of the agent.
        folder: where the bridge looks for tasksets of yours.
        recorder: the run's server.
        bridges: the run's bridges.
    """

    tools: Sequence[Mapping[str, JSON]] = ()

    def __init__(
        self,
        python: str,
        taskset: str | dict[str, Any],
        harness: str = "null",
        agent: dict[str, Any] | None = None,
        folder: str = ".",
        *,
        recorder: Recorder = per_run(open_recorder),
        bridges: Bridges = per_run(open_bridges),
    ) -> None:
        self._python, self._settings, self._folder = python, settings_of(taskset, harness, agent), folder
        self._recorder, self._bridges = recorder, bridges

    async def start(self, task: Task) -> Task:
        return task

    async def step(self, reply: Parsed) -> Step:
        raise AssertionError("a harness takes no turns: it plays by itself")

    async def close(self) -> None:
        pass

    async def play(self, run: TrajectoryRun) -> Outcome:
        return await play_recorded(run, self._recorder, Training(), self._episode)

    async def _episode(self, task: Task, endpoint: Endpoint) -> Ended:
        bridge = await self._bridges.get(self._python, self._settings, self._folder)
        episode = await bridge.episode(task, endpoint.openai_url, endpoint.key, "policy")
        return Ended(episode.reward, {}, dict(episode.metrics))
