"""An engine that says what it is told to, and what the rollout tests play with."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whet.data.template import Renderer
from whet.engine.base import Capabilities
from whet.env.base import Step
from whet.env.calculator import calculator
from whet.quickstart.model import make_tokenizer
from whet.types import Chunk, Finish, Message, Request, Task

HANG = "hang"
"""The engine samples nothing more until it is aborted."""
DEAF = "deaf"
"""The engine samples nothing more, and does not answer an abort either."""

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


Script = Callable[[Request], Sequence[Any]]


@dataclass
class ScriptedEngine:
    """Items of a script: a chunk, an exception to raise, HANG or DEAF. Every chunk that it hands over is kept in `sampled`."""

    script: Script
    version: int = 0
    capabilities: Capabilities = field(default_factory=lambda: Capabilities(10_000, True, True))
    requests: list[Request] = field(default_factory=list)
    sampled: list[tuple[str, Chunk]] = field(default_factory=list)
    """By conversation."""
    opened: Counter[str] = field(default_factory=Counter)
    released: Counter[str] = field(default_factory=Counter)
    running: set[str] = field(default_factory=set)
    aborts: dict[str, asyncio.Event] = field(default_factory=dict)

    def open(self, conversation: str) -> None:
        self.opened[conversation] += 1

    def release(self, conversation: str) -> None:
        self.released[conversation] += 1
        assert not any(request.startswith(f"{conversation}/") for request in self.running), "released while it generates"

    async def busy_s(self) -> float:
        return 0.0

    async def abort(self, request_id: str) -> None:
        if request_id in self.aborts:
            self.aborts[request_id].set()

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        self.running.add(request.id)
        self.aborts[request.id] = asyncio.Event()
        try:
            for item in self.script(request):
                await asyncio.sleep(0)
                if isinstance(item, BaseException):
                    raise item
                if item == DEAF:
                    await asyncio.Event().wait()
                if item == HANG:
                    await self.aborts[request.id].wait()
                    item = Chunk((), (), self.version, Finish.ABORT)
                self.sampled.append((request.conversation, item))
                yield item
        finally:
            try:
                for _ in range(20):  # taking a request out takes a while: whoever does not wait for it shows
                    await asyncio.sleep(0)
            finally:
                self.running.discard(request.id)

    def check_idle(self) -> None:
        """Nothing was left open, and nothing was let go of twice."""
        assert not self.running
        assert self.opened == self.released
        assert set(self.opened.values()) <= {1}


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
