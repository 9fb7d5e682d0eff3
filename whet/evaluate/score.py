"""Any reward over replies that exist already, so that it can be tried before a run: `whet score`."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from whet.evaluate.config import ScoreConfig
from whet.evaluate.recorded import read_trajectories
from whet.observe.display import Cell
from whet.reward import LabelError, Reward, RewardError, RewardTimeout, build_reward
from whet.types import JSON, Outcome, Rewards, Trajectory


@dataclass(slots=True)
class ScoreSummary:
    """Summary of the scored replies."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    totals: list[float] = field(default_factory=list[float])
    components: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    first_failure: str = ""
    seconds: float = 0.0

    def add(self, row: dict[str, JSON]) -> None:
        self.outcomes[row["outcome"]] += 1
        if row["reward"] is None:
            self.first_failure = self.first_failure or row["detail"]
            return
        self.totals.append(row["reward"])
        for name, value in row["components"].items():
            self.components.setdefault(name, []).append(value)

    def rows(self) -> list[tuple[str, Cell]]:
        """Name and value, for a table."""
        rows: list[tuple[str, Cell]] = [("replies", sum(self.outcomes.values())), ("scored", len(self.totals))]
        rows += [(f"not scored: {name}", count) for name, count in self.outcomes.items() if not Outcome(name).valid]
        if self.totals:
            mean = math.fsum(self.totals) / len(self.totals)
            spread = math.sqrt(math.fsum((total - mean) ** 2 for total in self.totals) / len(self.totals))
            rows += [("reward, mean", mean), ("reward, standard deviation", spread)]
            rows += [("reward, least", min(self.totals)), ("reward, greatest", max(self.totals))]
        rows += [(f"{name}, mean", math.fsum(values) / len(values)) for name, values in self.components.items()]
        return [*rows, ("seconds", self.seconds)]


def score_file(path: str, config: ScoreConfig, output: Path) -> ScoreSummary:
    """Score every reply of a file or folder, in order, one line of JSON each.

    A line has `id`, `origin`, `reward`, `components`, `outcome` and `detail`. Where no reward could be computed, `reward` is null and
    `detail` says why. The output is written whole or not at all.

    Raises:
        ValueError: the reward cannot be built, or a row is malformed (`file:line`).
    """
    if config.reward.group is not None:
        raise ValueError("reward.group scores siblings together, and whet score takes replies one by one; leave reward.group out")
    began = time.monotonic()
    summary = ScoreSummary()
    unfinished = output.with_name(output.name + ".tmp")
    output.parent.mkdir(parents=True, exist_ok=True)
    with closing(build_reward(config.reward)) as reward:
        try:
            asyncio.run(_score_all(read_trajectories(path), reward, config.concurrency, unfinished, summary))
            os.replace(unfinished, output)
        finally:
            unfinished.unlink(missing_ok=True)
    summary.seconds = time.monotonic() - began
    return summary


async def score_one(reward: Reward, trajectory: Trajectory) -> dict[str, JSON]:
    """A trajectory's line of the output."""
    base = {"id": trajectory.id, "origin": trajectory.task.origin}
    if not trajectory.outcome.valid:
        return {**base, **_failure(trajectory.outcome, f"the trajectory ended with the outcome {trajectory.outcome.value}")}
    try:
        rewards: Rewards = await reward(trajectory)
    except RewardTimeout as error:
        return {**base, **_failure(Outcome.TIMEOUT, str(error))}
    except (RewardError, LabelError) as error:
        return {**base, **_failure(Outcome.REWARD_ERROR, str(error))}
    parts = {"reward": rewards.total, "components": dict(rewards.components)}
    return {**base, **parts, "outcome": trajectory.outcome.value, "detail": rewards.detail}


def _failure(outcome: Outcome, detail: str) -> dict[str, JSON]:
    return {"reward": None, "components": {}, "outcome": outcome.value, "detail": detail}


async def _score_all(trajectories: Iterator[Trajectory], reward: Reward, concurrency: int, output: Path, summary: ScoreSummary) -> None:
    running: deque[asyncio.Task[dict[str, JSON]]] = deque()
    try:
        with output.open("w", encoding="utf-8") as lines:
            for trajectory in trajectories:
                running.append(asyncio.create_task(score_one(reward, trajectory)))
                if len(running) >= concurrency:
                    _write(await running.popleft(), lines, summary)
            while running:
                _write(await running.popleft(), lines, summary)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _write(row: dict[str, JSON], lines: TextIO, summary: ScoreSummary) -> None:
    summary.add(row)
    lines.write(json.dumps(row) + "\n")
