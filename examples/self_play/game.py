"""A game of two roles: a proposer names the opposite of a word, a critic judges the answer without knowing it."""

from __future__ import annotations

from collections.abc import Mapping

from whet.env.game import RolePlayer
from whet.types import Task

PROPOSER, CRITIC = "Name the opposite.", "Is it the opposite? Say yes or no."


class Review:
    """The proposer scores 1 for the right word, the critic for the right verdict."""

    roles = ("proposer", "critic")

    async def play(self, task: Task, players: Mapping[str, RolePlayer]) -> Mapping[str, float]:
        proposer, critic = players["proposer"], players["critic"]
        proposer.hear(PROPOSER, role="system")
        proposer.hear(task.prompt[-1].content)
        answer = await proposer.speak()
        if answer is None:
            return {"proposer": 0.0, "critic": 0.0}
        critic.hear(CRITIC, role="system")
        critic.hear(f"{task.prompt[-1].content} {answer}")
        verdict = await critic.speak()
        right = answer.strip() == task.label
        return {"proposer": float(right), "critic": float(verdict is not None and verdict.strip() == ("yes" if right else "no"))}
