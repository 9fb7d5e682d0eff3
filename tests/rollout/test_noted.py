"""What tools report beside their text goes through whole rollouts: into metrics, records and rewards, and across a resume."""

from __future__ import annotations

import asyncio
import json

from tests.fakes import FakeEngine, repeats
from tests.rollout.rolling import World
from tests.rollout.scripted import RENDERER, STOP, TASK, FakeEnv, ids, opens, run, says, turns
from whet.env.base import Step
from whet.env.limits import Limits
from whet.env.rollout import TrajectoryRun
from whet.env.tool_env import ToolEnv
from whet.env.tools import Tool, ToolResult
from whet.evaluate.recorded import read_trajectories
from whet.observe.metrics import flatten
from whet.observe.records import RecordWriter, read_records
from whet.rollout.control import ControlConfig
from whet.rollout.metrics import rollout_metrics
from whet.rollout.samples import samples_of_groups
from whet.types import Group, Origin, Outcome, Rewards, SamplingParams, TurnNote

CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
SAID = (*ids(CALL), STOP)


class Looks:
    """A tool with a number of calls; it ends the trajectory at `last`."""

    def __init__(self, last=None):
        self.num, self.last = 0, last

    @property
    def env(self):
        def look() -> ToolResult:
            """Looks."""
            self.num += 1
            stop = "found" if self.num == self.last else None
            return ToolResult("nothing", stop, {"depth": self.num}, {"path": [self.num]})

        return ToolEnv([Tool(look)])


def test_a_rollout_s_notes_are_in_its_metrics_its_records_and_its_rewards(tmp_path):
    scored = []

    async def score(trajectory):
        scored.append((trajectory.stop, [note.attachments for turn in trajectory.turns for note in turn.notes]))
        return Rewards(1.0)

    world = World(groups=1, samples=2, reward=score, make_env=lambda: Looks(2).env, engine=FakeEngine(repeats(SAID)))
    taken = run(world.take())
    assert all(t.outcome is Outcome.COMPLETED and len(t.turns) == 2 for t in taken.groups[0].trajectories)
    assert scored == [("found", [{"path": [1]}, {"path": [2]}])] * 2
    values = flatten(rollout_metrics(taken.groups))
    assert values["env/depth"] == 1.5 and values["outcome/stopped/found"] == 1.0
    path = RecordWriter(tmp_path).write(0, taken.groups, samples_of_groups(taken.groups))
    notes = [{"turn": n, "tool": "look", "metrics": {"depth": n + 1.0}, "attachments": json.dumps({"path": [n + 1]})} for n in (0, 1)]
    assert [(row["stop"], row["notes"]) for row in read_records(path)] == [("found", notes)] * 2
    again = list(read_trajectories(str(path)))
    assert [(t.stop, [turn.notes for turn in t.turns]) for t in again] == [
        (t.stop, [turn.notes for turn in t.turns]) for t in taken.groups[0].trajectories
    ]


def test_notes_survive_a_checkpoint_in_the_middle_of_a_turn():
    engine = FakeEngine(repeats(SAID))
    world = World(ControlConfig(), groups=1, samples=1, engine=engine, make_env=lambda: Looks().env, limits=Limits(2, 500, 50))

    async def main():
        taking = asyncio.ensure_future(world.take())
        while len(engine.sampled) < len(SAID) + 3:  # in the second turn
            await asyncio.sleep(0)
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await world.rollouts.put_back()
        state = world.rollouts.state()
        first, second = state["group_runs"][0]["interrupted"][0]["turns"]
        assert (first["finish"], second["finish"]) == ("stop", "abort")
        assert first["notes"] == [["look", {"depth": 1.0}, {"path": [1]}]] and second["notes"] == []
        world.restart(world.snapshot())
        (group,) = (await world.take()).groups
        return group.trajectories[0]

    trajectory = run(main())
    # The second turn is answered in a new environment, as the tool's own count shows; the first one is not asked for again.
    assert [turn.notes for turn in trajectory.turns] == [(TurnNote("look", {"depth": 1.0}, {"path": [1]}),)] * 2


def test_a_tool_that_fails_is_an_outcome_and_leaves_the_notes_of_earlier_turns():
    calls = []

    def look() -> ToolResult:
        """Looks."""
        calls.append(1)
        return ToolResult("", metrics={"depth": 1.0 if len(calls) == 1 else float("nan")})

    engine = FakeEngine(turns(says(CALL), says(CALL)))
    made = TrajectoryRun("t/0", TASK, engine, RENDERER, SamplingParams(999, stop_token_ids=(STOP,)), Limits(4, 1000, 200))

    async def main():
        return await made.to_end(opens(ToolEnv([Tool(look)])))

    trajectory = run(main())
    assert (trajectory.outcome, trajectory.error.where, trajectory.error.kind) == (Outcome.ENV_ERROR, "env.step", "TypeError")
    assert "raised by the tool look" in trajectory.error.traceback and __file__ in trajectory.error.traceback
    assert [turn.notes for turn in trajectory.turns] == [(TurnNote("look", {"depth": 1.0}),), ()]
    values = flatten(rollout_metrics([Group(TASK, (trajectory,))]))
    assert values["env/depth"] == 1.0 and "outcome/stopped/found" not in values


def test_a_user_s_own_way_to_play_keeps_the_answers_of_its_environment():
    answers = [Step(text="go on", counts={"hints": 1}, reward=0.5, notes=(TurnNote("", {"depth": 3}),)), Step(done=True, stop="enough")]

    async def play(run, env):
        reply = await run.sample(RENDERER.prompt(run.task, []), Origin.PROMPT)
        step = await run.step(env, reply)
        reply = await run.sample(ids(step.text), Origin.ENVIRONMENT)
        return Outcome.COMPLETED if (await run.step(env, reply)).done else Outcome.TRUNCATED

    engine = FakeEngine(turns(says("a"), says("b")))
    made = TrajectoryRun("t/0", TASK, engine, RENDERER, SamplingParams(999, stop_token_ids=(STOP,)), Limits(4, 1000, 200))

    async def main():
        return await made.to_end(opens(FakeEnv(answers)), play)

    trajectory = run(main())
    assert (trajectory.outcome, trajectory.stop, trajectory.counts) == (Outcome.COMPLETED, "enough", {"hints": 1})
    assert [(turn.reward, turn.notes) for turn in trajectory.turns] == [(0.5, (TurnNote("", {"depth": 3}),)), (None, ())]
