"""The environment seam: messages in, messages out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from whet.data.parsers import Parsed
from whet.types import JSON, Message, Task


@dataclass(frozen=True, slots=True)
class Step:
    """An environment's answer to a turn: messages, raw text that goes inside the assistant's turn, or neither (it is over)."""

    messages: tuple[Message, ...] = ()
    text: str = ""
    """Appended as it stands, without closing the assistant's turn."""
    done: bool = False
    reward: float | None = None
    """For this turn, if the environment gives any."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """What happened, counted."""

    def __post_init__(self) -> None:
        if self.messages and self.text:
            raise ValueError("an environment's step answers with messages or with raw text, not with both")
        if not (self.messages or self.text or self.done):
            raise ValueError("an environment's step that is not done must answer something")


class Env(Protocol):
    """One conversation's world. A new one is made for each trajectory."""

    @property
    def tools(self) -> Sequence[Mapping[str, JSON]]:
        """OpenAI schemas of the tools that the model is told about."""
        ...

    async def start(self, task: Task) -> Task:
        """Begin; may change the prompt."""
        ...

    async def step(self, reply: Parsed) -> Step:
        """Answer a turn of the model."""
        ...

    async def close(self) -> None: ...


class SingleTurn:
    """The environment of a plain question: the first reply ends it."""

    tools: Sequence[Mapping[str, JSON]] = ()

    async def start(self, task: Task) -> Task:
        return task

    async def step(self, reply: Parsed) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        pass
