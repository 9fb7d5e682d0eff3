"""A model with its engine, environment and reward, held open between calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from whet.api.rows import is_path, rows_text
from whet.build.parts import build_parts, build_runner, read_texts
from whet.build.process import prepare_process
from whet.data.files import Row, read_rows
from whet.data.rows import task_from
from whet.data.strict_json import parse_json
from whet.rollout.runner import greedily
from whet.rollout.sampling import RolloutConfig
from whet.settings.rl import RunConfig
from whet.types import Group, Task

T = TypeVar("T")


class LoopThread:
    """An event loop on a thread of its own, for calls from code that has none, or that runs in another one."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="whet-loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. An interrupt cancels it, and waits for its end."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Player:
    """Plays tasks with a model.

    Args:
        config: settings of the run.
        scored: False: nothing is scored, whatever reward the settings name.
        trainable: True if the model is going to learn.
        weights: what a run has trained of the model (`whet.build.trained`); None: the model as it is.

    Raises:
        ValueError: the model cannot be loaded, or the settings do not fit.
    """

    def __init__(self, config: RunConfig, *, scored: bool, trainable: bool = False, weights: Path | None = None) -> None:
        self.config = config
        self.num_played = 0
        """Calls of `play` so far."""
        self._ends = ExitStack()
        prepare_process(config)
        self.texts = read_texts(config)
        try:
            building = build_parts(config, self.texts, trainable=trainable, weights=weights, owns_run_dir=False)
            self.parts = self._ends.enter_context(building)
            runner = self.parts.runner
            self.runner = runner if scored else replace(runner, reward=None, group_reward=None)
            self.loop = LoopThread()
            if not trainable:
                self.loop.run(self.parts.publish())
        except BaseException:
            self._ends.close()
            raise

    def compute(self, work: Callable[[], T]) -> T:
        """The result of torch work, on the model's thread."""
        return self.parts.thread.submit(work).result()

    def set_rollout(self, rollout: RolloutConfig) -> None:
        """Play with these settings of sampling and limits from now on; nothing is scored."""
        self.runner = build_runner(self.config, rollout, self.config.env, (None, None), self.parts.engine, self.texts.renderer)

    def play(self, data: Any, samples: int, *, greedy: bool = False) -> list[Group]:
        """Play each task `samples` times. Arguments as for `whet.Policy.sample`.

        Raises:
            ValueError: a row is none, or greedy samples are to differ.
        """
        if greedy and samples > 1:
            raise ValueError(f"{samples} greedy samples of a prompt are all the same: ask for one, or raise the temperature")
        runner = replace(self.runner, sampling=greedily(self.runner.sampling)) if greedy else self.runner
        tasks = self.tasks(data)
        self.num_played += 1
        return self.loop.run(runner.play(tasks, samples, self.config.seed))

    def tasks(self, data: Any) -> list[Task]:
        """Tasks of rows: texts are prompts; tasks stay what they are, with their ids, which seed what is sampled."""
        if isinstance(data, str):
            data = [data] if not _is_file(data) else [row.values for row in read_rows(data)]
        if isinstance(data, Sequence) and data and all(isinstance(each, Task) for each in data):
            return list(data)
        if isinstance(data, Sequence) and data and all(isinstance(each, str) for each in data):
            data = [{self.config.data.prompt_key: each} for each in data]
        elif is_path(data):
            data = [row.values for row in read_rows(list(map(str, data)) if isinstance(data, list | tuple) else str(data))]
        rows: list[Mapping[str, Any]] = [parse_json(line) for line in rows_text(data, "prompts").splitlines()]
        name = f"sample_{self.num_played}"
        return [task_from(Row(row, f"row {i + 1}"), self.config.data, f"{name}/{i}#0") for i, row in enumerate(rows)]

    def end_resources(self) -> None:
        """Close what the tools of the present settings have open."""
        self.loop.run(self.runner.resources.aclose())

    def close(self) -> None:
        """End the engine, the tools' resources and the reward's workers."""
        if self._ends is None:
            return

        async def end() -> None:
            await self.parts.runner.resources.aclose()
            await self.parts.engine.close()

        with self._ends:
            self.loop.run(end())
            self.loop.close()


def _is_file(text: str) -> bool:
    return text.endswith((".jsonl", ".json", ".parquet", ".csv")) and "\n" not in text
