"""What the rollout tests play with: texts as chunks of an engine, tasks and environments."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import Script
from whet.data.template import Renderer
from whet.env.base import Step
from whet.env.calculator import calculator
from whet.quickstart.model import make_tokenizer
from whet.types import Chunk, Finish, Message, Task

TEXTS = ['<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>', "The answer is 36."] * 4
RENDERER = Renderer(make_tokenizer(TEXTS))
STOP = RENDERER.stop_token_ids[0]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>'


def ids(text: str) -> tuple[int, ...]:
    return RENDERER.encode(text)


def chunk(text: str, finish: Finish | None = None, version: int = 0) -> Chunk:
    """What says `text`; with STOP its stop token follows. Log-probs tell the tokens apart."""
    tokens = ids(text) + ((STOP,) if finish is Finish.STOP else ())
    return Chunk(tokens, tuple(-0.01 * (token + 1) for token in tokens), version, finish)


def says(text: str, version: int = 0) -> list[Chunk]:
    return [chunk(text, Finish.STOP, version)]


@dataclass
class ListSource:
    """Tasks from a list, one after another."""

    tasks: list[Task]
    num_taken: int = 0
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.tasks)

    def next(self, n: int) -> list[Task]:
        self.num_taken += n
        found = self.tasks[self.num_taken - n : self.num_taken]
        assert len(found) == n, "the source has no more tasks"
        return found

    def find(self, task_id: str) -> Task:
        return next(task for task in self.tasks if task.id == task_id)

    def state(self) -> Any:
        return {"num_taken": self.num_taken}

    def restore(self, state: Any) -> None:
        self.num_taken = state["num_taken"]


def turns(*replies: Sequence[Any]) -> Script:
    """The n-th call of a conversation gets the n-th reply."""
    return lambda request: replies[int(request.id.rpartition("/")[2])]


@dataclass
class FakeEnv:
    """An environment that does as it is told: each of `steps` is an answer, an exception, or a coroutine function."""

    steps: Sequence[Any] = (Step(done=True),)
    starting: Any = None
    closing: Any = None
    tools: Sequence[Any] = ()
    seen: list[Message] = field(default_factory=list)
    num_closed: int = 0

    async def start(self, task: Task) -> Task:
        return await _do(self.starting) or task

    async def step(self, reply: Any) -> Step:
        self.seen.append(reply.message)
        return await _do(self.steps[min(len(self.seen), len(self.steps)) - 1])

    async def close(self) -> None:
        self.num_closed += 1
        await _do(self.closing)


def opens(env: Any) -> Any:
    """What makes an environment that there is."""

    async def open_env() -> Any:
        return env

    return open_env


async def _do(item: Any) -> Any:
    if isinstance(item, BaseException):
        raise item
    if callable(item):
        return await item()
    return item


async def forever() -> Any:
    await asyncio.Event().wait()


TASK = Task("t", (Message("user", "12*3?"),), "36")
ANSWER = Step(messages=(Message("tool", calculator("12*3")),))


def run(coroutine: Any) -> Any:
    """Run it, for at most 30 seconds."""

    async def bounded() -> Any:
        async with asyncio.timeout(30):
            return await coroutine

    return asyncio.run(bounded())
