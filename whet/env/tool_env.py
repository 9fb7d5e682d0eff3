"""An environment of tools: calls are run and answered; a turn without calls, or a tool that stops, ends the conversation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from whet.data.parsers import Parsed
from whet.env.base import Step
from whet.env.tool_sets import AnyTool
from whet.env.tools import ToolArgumentError, ToolResult
from whet.types import JSON, Message, Task, ToolCall, Turn

MIN_REPLY_CHARS = 100
"""Room for what says that a reply was shortened."""
CutSide = Literal["head", "middle", "tail"]
"""The part that a text which is too long loses."""


@dataclass(frozen=True, slots=True)
class ReplyLimit:
    """The length of what others say to a model."""

    max_chars: int = 8192
    cut: CutSide = "middle"
    """The part that a longer text loses."""

    def shortened(self, text: str) -> str:
        """The text within the limit."""
        return shorten(text, self.max_chars, self.cut)


class ToolEnv:
    """Runs the calls of a turn side by side and answers each, in the order in which the model wrote them.

    What the model did wrong is answered with what is wrong, and counted: `tool_calls` that could be read,
    `tool_calls_malformed` that could not, and `tool_errors`, the readable ones that named no tool, had wrong arguments,
    or were refused by the tool.

    Args:
        tools: tools that the model may call; a reward or a test may share them, they keep no state.
        timeout_s: seconds that one call may take, None for any time; a call over it makes the trajectory a timeout.
        max_calls: calls of one turn that are run; further ones are answered with an error.
        max_reply_chars: longer answers lose a part.
        cut: the part.

    Raises:
        ValueError: there are no tools, two have the same name, or a limit makes no sense.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool],
        timeout_s: float | None = 30.0,
        max_calls: int = 8,
        max_reply_chars: int = 8192,
        cut: CutSide = "middle",
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if not tools or len(self._tools) != len(tools):
            names = [tool.name for tool in tools]
            advice = "env.tools; those of an MCP server take a prefix"
            raise ValueError(f"a tool environment needs tools with different names, not {names} ({advice})")
        if max_calls < 1 or max_reply_chars < MIN_REPLY_CHARS:
            raise ValueError(
                f"a tool environment needs max_calls of at least 1 and max_reply_chars of at least {MIN_REPLY_CHARS}, "
                f"not {max_calls} and {max_reply_chars}"
            )
        self._timeout_s = timeout_s
        self._max_calls = max_calls
        self._max_reply_chars = max_reply_chars
        self._cut: CutSide = cut

    @property
    def tools(self) -> Sequence[Mapping[str, JSON]]:
        return [tool.schema for tool in self._tools.values()]

    async def start(self, task: Task) -> Task:
        return task

    async def resume(self, task: Task, turns: Sequence[Turn]) -> Task:
        return task  # tools keep no state

    async def step(self, reply: Parsed) -> Step:
        calls = reply.message.tool_calls
        if not calls and not reply.malformed:
            return Step(done=True)
        counts: Counter[str] = Counter(tool_calls=len(calls), tool_calls_malformed=len(reply.malformed))
        results = await self._run(calls, counts)
        answers = [self._reply(result.content, call.name, call.id) for call, result in zip(calls, results, strict=True)]
        for fault in reply.malformed:  # each at its place among the calls; they are in order
            answers.insert(fault.place, self._reply(f"Error: {fault.text}", "error", f"call_{fault.place}"))
        notes = [note for call, result in zip(calls, results, strict=True) if (note := result.note(call.name)) is not None]
        stop = next((result.stop for result in results if result.stop is not None), None)
        return Step(messages=tuple(answers), counts=counts, done=stop is not None, stop=stop, notes=tuple(notes))

    async def close(self) -> None:
        pass

    async def _run(self, calls: Sequence[ToolCall], counts: Counter[str]) -> list[ToolResult]:
        jobs = (self._result(index, call, counts) for index, call in enumerate(calls))
        # All are waited for, so that no call outlives its turn; then the first that failed speaks for them.
        results: list[ToolResult] = []
        for result in await asyncio.gather(*jobs, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
        return results

    async def _result(self, index: int, call: ToolCall, counts: Counter[str]) -> ToolResult:
        tool = self._tools.get(call.name)
        try:
            if index >= self._max_calls:
                raise ToolArgumentError(f"more than {self._max_calls} calls in one turn; this one was not run")
            if tool is None:
                raise ToolArgumentError(f"there is no tool {call.name!r}; the tools are: {', '.join(self._tools)}")
            return await tool(call.arguments, self._timeout_s)
        except ToolArgumentError as error:
            counts["tool_errors"] += 1
            return ToolResult(f"Error: {error}")

    def _reply(self, content: str, name: str, call_id: str) -> Message:
        return Message("tool", shorten(content, self._max_reply_chars, self._cut), name=name, tool_call_id=call_id)


def shorten(text: str, max_chars: int, cut: CutSide = "middle") -> str:
    """The text, or what is left of it with a note, in place of the part `cut`, that says how much is missing. Never longer than
    `max_chars` (>= 100)."""
    if len(text) <= max_chars:
        return text
    # The note's length depends on the number in it, which is never longer than that of the whole text.
    kept = max_chars - len(_note(len(text)))
    head = {"head": 0, "middle": kept - kept // 2, "tail": kept}[cut]
    return text[:head] + _note(len(text) - kept) + text[len(text) - (kept - head) :]


def _note(num_chars: int) -> str:
    return f"\n[... {num_chars} characters left out ...]\n"
