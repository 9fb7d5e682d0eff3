"""Checks of rewards on one row: the label as a reply, and an empty reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from whet.check.boundary import run_user_code, run_user_coroutine
from whet.check.context import TRAINING, CheckContext
from whet.check.faults import SHOWN_FAULTS
from whet.check.findings import Note, fail, ok, skip, warn
from whet.check.play import START_DEADLINE_S, played
from whet.check.settings import IMPORT_DEADLINE_S
from whet.data.rows import missing_label
from whet.env.build import ENVS, EnvConfig, build_env_factory
from whet.reward import GroupReward, Reward, RewardConfig, build_group_reward, build_reward
from whet.reward.base import read_score
from whet.reward.labels import readers_of, unusable_rows
from whet.reward.pool import START_TIMEOUT_S
from whet.settings.rl import evaluation_env, evaluation_reward, evaluation_rows, training_rows
from whet.types import Finish, Message, Origin, Outcome, Rewards, Task, Trajectory, Turn
from whet.types.columns import Floats, Ints, Runs

FORMS = ("{}", "\\boxed{{{}}}", "#### {}", "The answer is {}.")
"""Forms of a right answer. The first that scores otherwise than an empty reply counts."""
GIVEN = ("environment", "roles")
"""Rewards that environments give."""
UNASKED = "the environment did not answer what was scored, so turn.reward is None; --tools has it answer"


def check_rewards(context: CheckContext) -> Iterator[Note]:
    """Check the rewards of training and of every evaluation set."""
    config = context.rl
    yield from _reward(context, TRAINING, config.reward, config.env)
    for name, chosen in config.evaluate.sets.items():
        for note in _reward(context, name, evaluation_reward(config, chosen), evaluation_env(config, chosen)):
            yield Note(note.status, f"{name}: {note.text}", note.lines)


def _reward(context: CheckContext, name: str, config: RewardConfig, env: EnvConfig) -> Iterator[Note]:
    rows = context.rows.get(name)
    if rows is None:
        yield skip("not scored: needs the rows")
        return
    task = context.tasks.get(name, rows[0])
    say = Says(context, task, rows[0], env if context.calls_tools else None)
    what = f"reward {config.name or ', '.join(config.components) or 'of the group'}"
    deadline_s = START_TIMEOUT_S + (1 + len(FORMS)) * (config.timeout_s + context.calls_tools * START_DEADLINE_S)
    unasked: list[str] = []
    with ExitStack() as ends:
        try:
            each, together = run_user_code(what, lambda: _build(config, context, ends), IMPORT_DEADLINE_S)
            unasked = [] if env.name in ENVS or context.calls_tools else [UNASKED]
            if config.name in GIVEN:
                yield ok(f"the reward {config.name} is what the environment gives as it is played, so no reply is tried here")
            elif each is not None:
                yield run_user_coroutine(what, lambda: _compare(say, each), deadline_s)
                if env.name in ENVS and readers_of(config):  # others may change tasks
                    yield run_user_coroutine(what, lambda: _labels(context, name, config, rows), IMPORT_DEADLINE_S)
            if together is not None:
                yield run_user_coroutine("reward.group", lambda: _siblings(say, each, together), deadline_s)
        except ValueError as error:
            yield fail(str(error), unasked)


def _build(config: RewardConfig, context: CheckContext, ends: ExitStack) -> tuple[Reward | None, GroupReward | None]:
    """Build the reward of single trajectories and that of siblings; `ends` closes them."""
    each = build_reward(config, context.folder) if config.scores_each else None
    if each is not None:
        ends.callback(each.close)
    together = build_group_reward(config)
    if together is not None:
        ends.callback(together.close)
    return each, together


@dataclass(frozen=True, slots=True)
class Says:
    """Maker of trajectories of one row with given replies."""

    context: CheckContext
    task: Task
    """Task as the environment made it."""
    row: Task
    env: EnvConfig | None
    """Environment that answers the reply; None: no environment."""

    async def __call__(self, reply: str, k: int = 0) -> Trajectory:
        """Trajectory number k of the task, whose only turn is `reply`."""
        shown = fabricated(self.context, self.task, reply, k)
        if self.env is None:
            return shown
        (turn,) = shown.turns
        task, step = await played(build_env_factory(self.env), self.row, turn.message)
        answered = replace(turn, reward=step.reward, notes=step.notes)
        return replace(shown, task=task, turns=(answered,), counts=dict(step.counts), stop=step.stop)


async def _siblings(say: Says, each: Reward | None, together: GroupReward) -> Note:
    """Score an empty reply and the label as siblings."""
    task = say.task
    siblings = [await say(reply, k) for k, reply in enumerate(("", task.label or "x"))]
    if each is not None:
        siblings = [replace(sibling, rewards=read_score(await each(sibling))) for sibling in siblings]
    empty, right = await together(siblings)
    return ok(f"{task.origin}: as siblings, an empty reply scores {empty.total:g}, the reply {siblings[1].response!r} {right.total:g}")


async def _compare(say: Says, reward: Reward) -> Note:
    """Score an empty reply, and the label in the forms that a right answer may have."""
    task = say.task
    empty = read_score(await reward(await say("")))
    if task.label is None:
        return ok(f"an empty reply scores {_numbers(empty)}; {task.origin} has no label to compare with")
    for form in FORMS:
        reply = form.format(task.label)
        right = read_score(await reward(await say(reply)))
        if right.total != empty.total:
            return ok(f"{task.origin}: the reply {reply!r} scores {_numbers(right)}, an empty one {_numbers(empty)}")
    same = f"{task.origin}: its label {task.label!r} as the reply and an empty reply both score {_numbers(empty)}"
    return warn(f"{same}: a reward that cannot tell them apart may be constant")


def _numbers(rewards: Rewards) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in rewards.components.items())
    return f"{rewards.total:g}" + (f" ({parts})" if len(rewards.components) > 1 else "")


async def _labels(context: CheckContext, name: str, config: RewardConfig, rows: Sequence[Task]) -> Note:
    """Check that the reward can score every row, as a run does before it begins."""
    faults = await unusable_rows(config, rows)
    if not faults:
        return ok(f"the labels of {len(rows)} rows can be used")
    return fail(f"the labels of {len(faults)} of {len(rows)} rows cannot be used{_missing(context, name)}", faults[:SHOWN_FAULTS])


def _missing(context: CheckContext, name: str) -> str:
    """Text about a missing column of labels; empty if there is one."""
    if context.rl.data.source is not None and name == TRAINING:
        return ""
    source = training_rows(context.rl) if name == TRAINING else evaluation_rows(context.rl, context.rl.evaluate.sets[name])
    return missing_label(source.path, source.label_key).replace("\n", ": ")


def fabricated(context: CheckContext, task: Task, reply: str, k: int = 0) -> Trajectory:
    """Completed trajectory number k of the task, whose only turn is `reply`."""
    tokens = Ints.zeros(1)
    if context.renderer is not None:
        tokens = Ints((*context.renderer.encode(reply), context.renderer.stop_token_ids[0]))
    turn = Turn(
        context=Ints.zeros(1),
        context_origin=Runs.repeat(Origin.PROMPT, 1),
        tokens=tokens,
        logprobs=Floats.zeros(len(tokens)),
        versions=Runs.repeat(0, len(tokens)),
        message=Message("assistant", reply),
        finish=Finish.STOP,
    )
    return Trajectory(f"{task.id}/{k}", task, (turn,), Outcome.COMPLETED)
