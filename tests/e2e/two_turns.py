"""An environment of two turns: after the first it asks its question, and the second ends the conversation."""

from whet.data.parsers import Parsed
from whet.env.base import Step
from whet.types import Message, Task

QUESTION = "which one ?"


class TwoTurns:
    tools = ()

    def __init__(self) -> None:
        self.asked = False

    async def start(self, task: Task) -> Task:
        return task

    async def step(self, reply: Parsed) -> Step:
        if self.asked:
            return Step(done=True)
        self.asked = True
        return Step(messages=(Message("user", QUESTION),))

    async def close(self) -> None:
        pass
