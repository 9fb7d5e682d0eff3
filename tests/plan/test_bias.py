"""A class of tasks that takes ten times as long has the share in what trains that it has in what was admitted, under a staleness bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whet.plan.rollouts import simulate as simulation
from whet.plan.rollouts.config import SimulationConfig
from whet.plan.rollouts.world import SimulatedSource, World
from whet.types.columns import num_true

pytestmark = pytest.mark.long

CONTROLS = {
    "sync": {},
    "overlap": {"max_staleness": 1},
    "stale": {"max_staleness": 3},
    "partial": {"max_staleness": 2, "overlap": False, "partial": True, "over_sample": 1.5},
}


def is_slow(task: str) -> bool:
    return int(task[1:].partition("/")[0]) % 4 == 0


class TwoClasses(World):
    """A world in which each fourth task has replies and tools that take ten times as long."""

    def plan_of(self, trajectory):
        plan = super().plan_of(trajectory)
        if not is_slow(trajectory):
            return plan
        return replace(plan, turns=tuple(replace(turn, tokens=10 * turn.tokens, tool_s=10 * turn.tool_s) for turn in plan.turns))


@pytest.mark.parametrize("control", CONTROLS)
def test_slow_tasks_keep_their_share(control, monkeypatch):
    admitted, trained = [], []

    class Source(SimulatedSource):
        def next(self, n):
            found = super().next(n)
            admitted.extend(task.id for task in found)
            return found

    class Recipe(simulation.Recipe):
        def samples(self, groups, version):
            found, metrics = super().samples(groups, version)
            trained.extend({sample.group for sample in found if num_true(sample.loss_mask)})
            return found, metrics

    for name, value in {"World": TwoClasses, "SimulatedSource": Source, "Recipe": Recipe}.items():
        monkeypatch.setattr(simulation, name, value)
    simulation.simulate(
        SimulationConfig.model_validate(
            {
                "num_rollouts": 60,
                "grain": 32,
                "batch": {"prompts_per_rollout": 16, "samples_per_prompt": 4},
                "control": CONTROLS[control],
                "replies": {"prompt_tokens": 64, "median_tokens": 300, "sigma": 0.3, "max_tokens": 1000, "turns": 2.0},
                "trainer": {"step_s": 2.0},
            }
        )
    )
    share = [sum(map(is_slow, tasks)) / len(tasks) for tasks in (admitted, trained)]
    assert len(trained) > 900 and abs(share[0] - share[1]) <= 0.02, (share, len(admitted), len(trained))
