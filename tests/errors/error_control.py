"""Errors of what controls rollouts: settings that do not go together, filters, orders, and rollouts that come to nothing."""

from __future__ import annotations

from tests.errors.error_bench import Bench, Case, Told, together

MINE = '''\
"""Filters, an order and a reward of my own."""


def too_easy(group):
    return "easy" if group.task.metadata["pass_rate"] > 0.9 else None


def wants(group):
    return len(group.trajectories) > 1


def never(group):
    return "not today"


def best_half(groups):
    return groups[: len(groups) // 2]


def by_difficulty(groups):
    return sorted(groups, key=lambda group: group.task.metadata["pass_rate"])


def half_a_reward(trajectory):
    return {"0": 0.0, "1": 1.0}[trajectory.id[-1]]
'''


def filtered_by(bench: Bench, *names: str) -> Told:
    """A run with one filter after another."""
    return together(*(bench.refused(f'control.filters=[{{name="{name}"}}]', "num_rollouts=2") for name in names))


def timing(bench: Bench) -> Told:
    return together(
        bench.refused("control.max_staleness=1", "deterministic=true"),
        bench.refused("control.retries=1", "deterministic=true"),
        bench.refused("control.partial=true", "deterministic=true"),
        bench.refused("control.overlap=true"),
        bench.refused("control.max_staleness=1", "control.partial=true"),
        bench.refused("control.max_staleness=1", "control.over_sample=2"),
        bench.refused("control.retry_budget=3"),
    )


def unknown_filter(bench: Bench) -> Told:
    return together(
        filtered_by(bench, "zero_sdt"),
        bench.refused('control.filters=[{name="length", options={max=9}}]'),
        bench.refused('control.filters=[{name="length", options={min_tokens=-1}}]'),
    )


def filter_fails(bench: Bench) -> Told:
    bench.file("mine.py", MINE)
    return filtered_by(bench, "mine.py:too_easy", "mine.py:wants")


def order_fails(bench: Bench) -> Told:
    bench.file("mine.py", MINE)
    return together(*(bench.refused(f"control.order=mine.py:{name}", "num_rollouts=2") for name in ("best_half", "by_difficulty")))


def nothing_kept(bench: Bench) -> Told:
    bench.file("mine.py", MINE)
    return bench.refused('control.filters=[{name="mine.py:never"}]', "control.give_up_after=2", "num_rollouts=2")


def too_many_errors(bench: Bench) -> Told:
    bench.file("mine.py", MINE)
    return bench.refused("reward.name=mine.py:half_a_reward", "control.max_error_rate=0.4", "control.error_window=8", "num_rollouts=2")


def mended_filter(bench: Bench) -> tuple[str, ...]:
    bench.rewrite("mine.py", "return len(group.trajectories) > 1", "return None")
    return 'control.filters=[{name="mine.py:wants"}]', "num_rollouts=2"


def mended_order(bench: Bench) -> tuple[str, ...]:
    bench.rewrite("mine.py", 'group.task.metadata["pass_rate"])', "group.task.id)")
    return "control.order=mine.py:by_difficulty", "num_rollouts=2"


def mended_never(bench: Bench) -> tuple[str, ...]:
    bench.rewrite("mine.py", 'return "not today"', "return None")
    return 'control.filters=[{name="mine.py:never"}]', "control.give_up_after=2", "num_rollouts=2"


def mended_half(bench: Bench) -> tuple[str, ...]:
    bench.rewrite("mine.py", '{"0": 0.0, "1": 1.0}[trajectory.id[-1]]', "int(trajectory.id[-1]) % 2")
    return "reward.name=mine.py:half_a_reward", "control.max_error_rate=0.4", "control.error_window=8", "num_rollouts=2"


CONTROL = (
    Case(
        id="control-timing",
        title="Rollouts that cannot be as they are wanted",
        cause="What `control` asks for does not go together, or depends on how long things take, which `deterministic = true` rules out.",
        remedy="Change what the message names.",
        words=(
            "control.max_staleness=1 with deterministic=true",
            "control.retries=1 with deterministic=true",
            "control.partial=True with deterministic=true",
            "control.overlap is true with max_staleness=0",
            "control.partial has no meaning with overlap",
            "control.over_sample=2.0 has no meaning with overlap",
            "control.retry_budget=3 bounds nothing with control.retries=0",
        ),
        provoke=timing,
        seen_by_check=True,
    ),
    Case(
        id="control-filter-unknown",
        title="A filter that there is not",
        cause="`control.filters` names no filter, or gives one an option that it does not have or a value out of range.",
        remedy="Choose one of those that the message names, with its options, or name a function of your own.",
        words=("there is no filter 'zero_sdt'; choose zero_std", "control.filters: length: options.max: unknown key", "options.min_tokens = -1"),
        provoke=unknown_filter,
        seen_by_check=True,
    ),
    Case(
        id="control-filter-fails",
        title="A filter that fails",
        cause="Your function raised, or returned something that is no reason. Nobody knows which groups it would have kept, so the run stops.",
        remedy="Correct the function: it returns why the group is dropped, or None. The same command goes on; groups that are finished are not "
        "played again, but before the first update all is.",
        words=("raised KeyError: 'pass_rate' (at .../mine.py:5 in too_easy)", "returned True for task", "return why the group is dropped, or None"),
        provoke=filter_fails,
        seen_by_check=False,  # check plays no groups
        mend=mended_filter,
    ),
    Case(
        id="control-order-fails",
        title="An order that loses groups",
        cause="The function that `control.order` names returned other groups than it was given, or raised.",
        remedy="Return all of them, sorted; to drop some is what `control.filters` is for.",
        words=("control.order", "returned 1", "raised KeyError: 'pass_rate' (at .../mine.py:21 in"),
        provoke=order_fails,
        seen_by_check=False,  # check plays no groups
        mend=mended_order,
    ),
    Case(
        id="control-nothing-kept",
        title="Filters that drop every group",
        cause="So many groups were dropped one after another as `control.give_up_after` rollouts have. The message counts their reasons.",
        remedy="See whether the tasks are too easy or too hard for the model (`whet check` plays some), or loosen the filters.",
        words=("groups one after another (4 for not today)", "control.filters", "control.give_up_after"),
        provoke=nothing_kept,
        seen_by_check=False,  # check plays no groups
        mend=mended_never,
    ),
    Case(
        id="control-error-rate",
        title="More failures than are allowed",
        cause="Of the last `control.error_window` trajectories (64; a rollout's worth at least) a greater share failed than `control.max_error_rate` "
        "(0.3). What failed, and where, is counted below, with the first traceback.",
        remedy="Mend what failed, or raise the rate (1: never stop for it). The same command goes on from what was saved.",
        words=("4 of 8 trajectories failed, which is more than control.max_error_rate = 0.4 of them", "4 in reward: RewardError", "KeyError"),
        provoke=too_many_errors,
        seen_by_check=False,  # only on some rows, and check tries the first
        mend=mended_half,
    ),
)
