"""Tools of the example: those of an MCP server for files, over a folder that each trajectory has of its own.

The server is a program with a folder as its last argument, such as `@modelcontextprotocol/server-filesystem`. The folder begins with the
files of the row's metadata and ends with the trajectory. After each call the folder's files are noted in the turn, where the reward finds
them.
"""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from whet.env.mcp.server import McpServer, McpSession
from whet.env.mcp.tools import McpTool, McpTools
from whet.env.resources import Resource, per_trajectory
from whet.env.tools import ToolResult
from whet.types import JSON, Task

TOOLS = ("list_directory", "read_text_file", "write_file", "edit_file")
"""The server's tools that the model gets."""


@dataclass(frozen=True, slots=True)
class Desk:
    """The folder of a trajectory, and the session of the server that works in it."""

    folder: Path
    session: McpSession
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Calls of one reply come one after the other, in the order in which the model wrote them."""

    def files(self) -> dict[str, JSON]:
        """The text of each file, by its path in the folder."""
        found = sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return {str(path.relative_to(self.folder)): path.read_text("utf-8", errors="replace") for path in found}


class OpensDesk(Protocol):
    """Opens the desk of a trajectory."""

    def __call__(self, task: Task) -> AbstractAsyncContextManager[Desk]: ...


def opener(command: Sequence[str]) -> OpensDesk:
    """What opens desks whose server is started by the command, with the folder behind it."""

    @asynccontextmanager
    async def desk(task: Task) -> AsyncIterator[Desk]:
        with tempfile.TemporaryDirectory(prefix="whet-desk-") as made:
            folder = Path(made).resolve()
            for name, text in files_of(task).items():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
            async with McpServer((*command, str(folder))).connect() as session:
                yield Desk(folder, session)

    return desk


def files_of(task: Task, key: str = "files") -> dict[str, str]:
    """Files of the row's metadata."""
    found = task.metadata[key]
    assert isinstance(found, Mapping)
    return {str(name): str(text) for name, text in found.items()}


class FolderTool:
    """A tool of the server, which works in the trajectory's folder.

    Args:
        inner: the tool.
        desk: resource of the trajectory's desk.
    """

    def __init__(self, inner: McpTool, desk: Resource) -> None:
        self.name, self.schema = inner.name, inner.schema
        self.needs = {"desk": desk}
        self._inner, self._desk = inner, None

    def bound(self, opened: Mapping[str, Any]) -> FolderTool:
        tool = copy.copy(self)
        tool._desk = opened["desk"]
        tool._inner = self._inner.bound({"session": opened["desk"].session})
        return tool

    async def __call__(self, arguments: Mapping[str, JSON], timeout_s: float | None) -> ToolResult:
        """Call it: what it answers, and the folder's files afterwards."""
        desk: Any = self._desk
        async with desk.turn:
            result = await self._inner(arguments, timeout_s)
            return replace(result, attachments={"files": desk.files()})


def folder_tools(command: Sequence[str], only: Sequence[str] = TOOLS) -> list[FolderTool]:
    """The tools.

    Args:
        command: program and arguments of the server, without the folder.
        only: names of the tools to offer.
    """
    with tempfile.TemporaryDirectory(prefix="whet-desk-") as empty:
        listed = McpTools(command=[*command, empty], only=only).make()
    desk: Any = per_trajectory(opener(command))
    return [FolderTool(tool, desk) for tool in listed]
