"""The conversation of a trajectory as messages, for templates that leave the thinking of earlier turns out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from whet.data.parsers import Parsed, ToolSchemas
from whet.data.template import Renderer
from whet.types import Message, Task

THINKING_LEFT_OUT = "thinking_left_out"
"""In a trajectory's counts: turns before which the thinking of earlier ones was left out, so that a new training sample begins."""


@dataclass(slots=True)
class MessageHistory:
    """Messages of a trajectory so far."""

    messages: list[Message] = field(default_factory=list[Message])

    def begin(self, task: Task) -> None:
        """Begin with a task's prompt."""
        self.messages = [] if isinstance(task.prompt, str) else list(task.prompt)

    def add(self, reply: Parsed, text: str, answers: Sequence[Message]) -> None:
        """Add a turn and its answers.

        Args:
            text: the turn's own text, which is kept if a call in it is malformed: no message has that.
        """
        self.messages += [Message("assistant", text) if reply.malformed else reply.message, *answers]

    def without_thinking(self, renderer: Renderer, tools: ToolSchemas) -> tuple[Message, ...]:
        """The messages without the thinking that the template leaves out before the next turn; empty: it leaves none out."""
        dropped = renderer.drops_thinking(self.messages, tools)
        return tuple(replace(m, reasoning_content=None) if i in dropped else m for i, m in enumerate(self.messages)) if dropped else ()
