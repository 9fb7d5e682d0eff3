"""A reward on single tokens alone: 1 on the first token of the second turn where it is the wanted word."""

from whet.types import Rewards, Trajectory


def score(trajectory: Trajectory) -> Rewards:
    rows = [[0.0] * len(turn.tokens) for turn in trajectory.turns]
    if len(rows) == 2 and trajectory.turns[1].message.content.startswith(trajectory.task.label or "?"):
        rows[1][0] = 1.0
    return Rewards(0.0, token_rewards=tuple(map(tuple, rows)))
