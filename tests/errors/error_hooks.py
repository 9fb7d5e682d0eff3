"""Errors of the functions of a user's own that a run calls between its parts."""

from __future__ import annotations

from tests.errors.error_bench import Bench, Case, Told, together

MINE = '''\
"""What a run calls between its parts."""
import dataclasses


class Sums:
    def __init__(self, seed):
        pass

    def __len__(self):
        return 0


def told(groups):
    return {}


async def waits(rollout_id, groups, dropped, metrics):
    return {}


def counts(rollout_id, groups, dropped, metrics):
    return {"mine/longest": max(group.task.metadata["length"] for group in groups)}


def says(rollout_id, groups, dropped, metrics):
    return {"mine/best": "the first"}


def shorter(samples, groups):
    return [dataclasses.replace(samples[0], tokens=samples[0].tokens[:-1]), *samples[1:]]


def twice(samples, groups):
    return [*samples, samples[0]]
'''


SOURCE = '''
run_dir = "runs/demo"
[model]
path = "model"
[data]
source = "mine.py:Sums"
[batch]
prompts_per_rollout = 4
samples_per_prompt = 2
[reward]
name = "exact"
'''


def cannot_be_called(bench: Bench) -> Told:
    bench.file("mine.py", MINE)
    return together(
        bench.refused("observe.on_rollout=mine.py:tells"),
        bench.refused("observe.on_rollout=mine.py:told"),
        bench.refused("observe.on_rollout=mine.py:waits"),
        bench.refused("rollout.play=mine.py:told"),
        bench.refused("control.rollout=mine.py:told"),
    )


def fails(bench: Bench) -> Told:
    bench.file("mine.py", MINE)
    settings = ("observe.on_rollout=mine.py:counts", "observe.on_rollout=mine.py:says", "batch.process=mine.py:shorter", "batch.process=mine.py:twice")
    return together(*(bench.refused(setting, "num_rollouts=9") for setting in settings))


def mended_process(bench: Bench) -> tuple[str, ...]:
    bench.rewrite("mine.py", "return [*samples, samples[0]]", "return samples")
    return "batch.process=mine.py:twice", "num_rollouts=9"


def source(bench: Bench) -> Told:
    bench.file("mine.py", MINE)
    bench.file("own.toml", SOURCE)
    return bench.refused(config="own.toml")


HOOKS = (
    Case(
        id="hook-cannot-be-called",
        title="A function of your own that cannot be called",
        cause="A setting names a function that is not there, takes other arguments than it would be given, or is `async` where a plain one is called "
        "(or the other way round).",
        remedy="Write it with the arguments and in the form that docs/extending.md shows for this place.",
        words=(
            "mine.py has no 'tells'",
            "'mine.py:told' cannot be called as f(rollout_id, groups, dropped, metrics)",
            "is an async function; write it with plain `def`",
            "rollout.play 'mine.py:told' cannot be called as f(run, env)",
            "control.rollout 'mine.py:told' is a plain function; write it with `async def`",
        ),
        provoke=cannot_be_called,
        seen_by_check=True,
    ),
    Case(
        id="hook-fails",
        title="A function of your own that fails between two parts of a run",
        cause="It raised, or returned something that its place does not allow. Nobody knows what it would have given, so the run stops.",
        remedy="Correct the function, at the line that the message names. The same command goes on from what was saved.",
        words=(
            "raised KeyError: 'length' (at .../mine.py:22 in",
            "return a dict of numbers by name, or None",
            "batch.process = 'mine.py:shorter' raised ValueError: a sample's per-token fields differ in length",
            "twice",
        ),
        provoke=fails,
        seen_by_check=False,  # check plays no rollouts
        mend=mended_process,
        goes_wrong_at_once=False,  # some are called after an update
    ),
    Case(
        id="hook-source",
        title="A source of your own that is none",
        cause="What `data.source` names does not have all that a source needs.",
        remedy="Write the members that the message names, as docs/extending.md shows them.",
        words=("data.source = 'mine.py:Sums' made a Sums, which has no epoch, next, find, state, restore",),
        provoke=source,
        seen_by_check=True,
    ),
)
