"""An environment of tools: calls are run and answered; a turn without calls ends the conversation."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from whet.data.parsers import Parsed
from whet.env.base import Step
from whet.env.tools import Tool, ToolArgumentError
from whet.types import JSON, Message, Task, ToolCall


class ToolEnv:
    """Runs the calls of a turn side by side and answers each, in order; what is malformed is answered with what is wrong.

    Args:
        tools: what the model may call.
        timeout_s: seconds that one call may take; a call over it fails the trajectory as a timeout.
        max_calls: calls of one turn that are run; further ones are answered with an error.
    """

    def __init__(self, tools: Sequence[Tool], timeout_s: float = 30.0, max_calls: int = 8) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._timeout_s = timeout_s
        self._max_calls = max_calls

    @property
    def tools(self) -> Sequence[Mapping[str, JSON]]:
        return [tool.schema for tool in self._tools.values()]

    async def start(self, task: Task) -> Task:
        return task

    async def step(self, reply: Parsed) -> Step:
        calls = reply.message.tool_calls
        if not calls and not reply.malformed:
            return Step(done=True)
        counts: Counter[str] = Counter(tool_calls=len(calls), tool_calls_malformed=len(reply.malformed))
        answers = await asyncio.gather(*(self._answer(i, call, counts) for i, call in enumerate(calls)))
        faults = [Message("tool", f"Error: {text}", name="error") for text in reply.malformed]
        return Step(messages=(*answers, *faults), counts=counts)

    async def close(self) -> None:
        pass

    async def _answer(self, index: int, call: ToolCall, counts: Counter[str]) -> Message:
        tool = self._tools.get(call.name)
        try:
            if index >= self._max_calls:
                raise ToolArgumentError(f"more than {self._max_calls} calls in one turn")
            if tool is None:
                raise ToolArgumentError(f"there is no tool {call.name!r}; the tools are: {', '.join(self._tools)}")
            content = await tool(call.arguments, self._timeout_s)
        except ToolArgumentError as error:
            counts["tool_errors"] += 1
            content = f"Error: {error}"
        return Message("tool", content, name=call.name, tool_call_id=call.id)
