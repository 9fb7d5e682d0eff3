"""Games in words: the model reads an observation and answers with an action."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from whet.data.parsers import Parsed
from whet.env.base import Step
from whet.env.threads import DaemonThreads
from whet.types import JSON, Message, Task, TurnNote

THREADS = DaemonThreads(128)
"""Threads of games, whose functions block."""


class IllegalAction(ValueError):
    """A reply holds no action. The text is the answer that the model gets; the game does not move."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A game's answer to an action."""

    observation: str
    reward: float | None = None
    done: bool = False
    truncated: bool = False
    """With `done`: a limit ended the game."""
    stop: str | None = None
    """Short reason for the end."""
    notes: Mapping[str, JSON] = field(default_factory=dict[str, JSON])
    """Data for the records."""


class TextGame(Protocol):
    """A game of one player. Its methods may block; one of them runs at a time."""

    def begin(self, seed: int, task: Task) -> str:
        """Begin a game. Returns the first observation."""
        ...

    def act(self, reply: str) -> Moved:
        """Play a turn.

        Raises:
            IllegalAction: the reply holds no action.
        """
        ...

    def close(self) -> None: ...


class GameEnv:
    """The environment of a game: the first observation ends the prompt, each later one is a message of the user.

    Siblings of a prompt play the same game: its seed is the row's `seed`, else it is drawn from the task's id, which is another one in
    every epoch.
    """

    tools = ()

    def __init__(self, game: TextGame) -> None:
        self._game = game

    async def start(self, task: Task) -> Task:
        first = await THREADS.run(lambda: self._game.begin(seed_of(task), task), None)
        return with_text(task, first)

    async def step(self, reply: Parsed) -> Step:
        try:
            moved = await THREADS.run(lambda: self._game.act(reply.message.content), None)
        except IllegalAction as error:
            return Step(messages=(Message("user", f"Error: {error}"),), counts={"illegal_actions": 1})
        notes = (TurnNote(attachments=moved.notes),) if moved.notes else ()
        if moved.done:
            return Step(done=True, truncated=moved.truncated, reward=moved.reward, stop=moved.stop, notes=notes)
        return Step(messages=(Message("user", moved.observation),), reward=moved.reward, notes=notes)

    async def close(self) -> None:
        await THREADS.run(self._game.close, None)


def with_text(task: Task, text: str) -> Task:
    """The task with a text at the end of its prompt: in its last message, if that is the user's."""
    if not text:
        return task
    if isinstance(task.prompt, str):
        return replace(task, prompt=f"{task.prompt}\n\n{text}" if task.prompt else text)
    *before, last = task.prompt or (Message("user", ""),)
    if last.role != "user":
        return replace(task, prompt=(*task.prompt, Message("user", text)))
    content = f"{last.content}\n\n{text}" if last.content else text
    return replace(task, prompt=(*before, replace(last, content=content)))


def seed_of(task: Task) -> int:
    """The row's `seed`, else one that is drawn from the task's id: siblings have the same."""
    given = task.metadata.get("seed")
    if isinstance(given, int):
        return given
    return int.from_bytes(hashlib.blake2b(task.id.encode(), digest_size=4).digest(), "big") >> 1
