"""Tools of an MCP server as tools of an environment."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from whet.env.mcp.listed import note_listed
from whet.env.mcp.pipes import CommandRoom
from whet.env.mcp.results import text_of
from whet.env.mcp.server import McpServer, McpSession, ServerFailed, changes, digest_of, innermost, require_mcp
from whet.env.resources import Resource, per_group, per_run, per_trajectory
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.open import for_command, isolating
from whet.env.tools import ToolArgumentError, ToolResult
from whet.types import JSON

if TYPE_CHECKING:
    from jsonschema.protocols import Validator
    from mcp_types import Tool as Listed

SESSIONS = {"trajectory": per_trajectory, "group": per_group, "run": per_run}
ANY_TIME_S = 1e9
"""In place of no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class McpTools:
    """The tools of an MCP server, which is asked for them once, when they are made. Later sessions must offer the same."""

    command: Sequence[str] = ()
    """Program and arguments of a server over its pipes."""
    url: str = ""
    """Address of a server over streamable HTTP, in place of a command."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further variables of the program's environment; a value `$NAME` is the variable NAME of this process."""
    headers_env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Headers of every request, each with the name of the variable that holds its value."""
    session: Literal["trajectory", "group", "run"] = "trajectory"
    """The part of a run that has a session of its own."""
    prefix: str = ""
    """Beginning of the tools' names, which tells those of several servers apart."""
    only: Sequence[str] = ()
    """Names of the tools to offer; none: all."""
    start_timeout_s: float = 60.0
    """Seconds for the server to start and to list its tools."""
    sandbox: bool = False
    """Each session's program runs in a sandbox of its own, without network."""
    sandboxes: SandboxConfig = field(default_factory=SandboxConfig)
    """Limits of these sandboxes."""

    def make(self) -> list[McpTool]:
        """Ask the server for its tools.

        Raises:
            ValueError: the options do not fit together, the server cannot be started, or it has no such tools; or nothing on this machine
                isolates a server that is to run in a sandbox.
        """
        if isinstance(self.command, str) or self.session not in SESSIONS:
            raise ValueError(f"an MCP server has a command that is a list of texts, and a session of {', '.join(SESSIONS)}")
        require_mcp()
        server = self._server()
        found = _now(server)
        names = tuple(self.only) or tuple(found)
        if missing := [name for name in names if name not in found]:
            raise ValueError(f"the MCP server {server.name} has no tool {', '.join(missing)}; it has {', '.join(found)}")
        resource = _sessions(server, {name: digest_of(found[name]) for name in names}, self.session)
        return [McpTool(found[name], resource, self.prefix) for name in names]

    def _server(self) -> McpServer:
        server = McpServer(tuple(self.command), self.url, dict(self.env), dict(self.headers_env), self.start_timeout_s)
        if self.sandbox not in (True, False) or (self.sandbox and self.url):
            raise ValueError(f"sandbox is true or false, and belongs to the command of an MCP server; not {self.sandbox!r}")
        if not self.sandbox:
            return server
        whole, paths = for_command(self.sandboxes, server.command, server.environment, network=False)
        return replace(server, room=CommandRoom(whole, paths, self.sandboxes))


def _now(server: McpServer) -> dict[str, Listed]:
    """The server's tools, from a session that ends before it returns. Called with an event loop running or without."""

    async def listed() -> dict[str, Listed]:
        async with server.connect() as session:
            try:
                return await session.list_tools()
            except Exception as error:  # of another process
                raise error if isinstance(error, ServerFailed) else session.failed("tools/list", error) from error

    with ThreadPoolExecutor(1, "whet-mcp") as thread:
        try:
            return thread.submit(lambda: asyncio.run(listed())).result()
        except Exception as error:  # of another process; the session may have grouped it
            found = innermost(error)
            raise ValueError(str(found)) from error


def _sessions(server: McpServer, digests: Mapping[str, str], session: str) -> Resource:
    """The resource of a session, for all tools of the server."""

    @asynccontextmanager
    async def mcp_session(*task: object) -> AsyncIterator[McpSession]:
        async with server.connect() as opened:
            try:
                listed = await opened.list_tools()
            except Exception as error:  # of another process
                raise opened.failed("tools/list", error) from error
            if changed := changes(digests, listed, tuple(digests)):
                raise ServerFailed(f"the MCP server {server.name} offers other tools than when the run was built: {changed}")
            yield opened

    if server.room is not None:
        isolating(mcp_session, server.room.config)
    note_listed(mcp_session, server.name, digests)
    resource: Any = SESSIONS[session](mcp_session)
    return resource


class McpTool:
    """A tool of an MCP server.

    Args:
        listed: as the server lists it.
        session: resource of the session that calls go to.
        prefix: beginning of its name.
    """

    def __init__(self, listed: Listed, session: Resource, prefix: str = "") -> None:
        self.name = prefix + listed.name
        self.needs = {"session": session}
        self._listed = listed
        self._arguments = _validator(listed)
        self._session: McpSession | None = None

    @property
    def schema(self) -> dict[str, JSON]:
        function = {"name": self.name, "description": self._listed.description or "", "parameters": self._listed.input_schema}
        return {"type": "function", "function": function}

    def bound(self, opened: Mapping[str, Any]) -> McpTool:
        tool = copy.copy(self)
        tool._session = opened["session"]
        return tool

    async def __call__(self, arguments: Mapping[str, JSON], timeout_s: float | None) -> ToolResult:
        """Call it: the texts of its result.

        Raises:
            ToolArgumentError: the arguments do not fit its schema, or the tool answered with an error.
            TimeoutError: it took longer than `timeout_s`.
            ServerFailed: the server ended, or broke the protocol.
        """
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS, INVALID_REQUEST, REQUEST_TIMEOUT

        self._check(arguments)
        assert self._session is not None, "its environment was opened"
        try:
            async with asyncio.timeout(timeout_s):
                result = await self._session.client.call_tool(self._listed.name, dict(arguments), timeout_s or ANY_TIME_S)
        except MCPError as error:
            if error.error.code in (INVALID_PARAMS, INVALID_REQUEST):  # the call's fault, or a question to a user who is not there
                raise ToolArgumentError(error.error.message) from error
            if error.error.code == REQUEST_TIMEOUT:
                raise self._late(timeout_s) from error
            raise self._session.failed(f"the tool {self.name}", error) from error
        except TimeoutError as late:
            raise self._late(timeout_s) from late
        except Exception as error:  # a server of others may answer anything
            raise self._session.failed(f"the tool {self.name}", error) from error
        text = text_of(result)
        if result.is_error:
            raise ToolArgumentError(text or "the tool failed and gave no reason")
        return ToolResult(text)

    def _late(self, timeout_s: float | None) -> TimeoutError:
        return TimeoutError(f"tool {self.name} took longer than {timeout_s} s (env.tool_timeout_s)")

    def _check(self, arguments: Mapping[str, JSON]) -> None:
        from jsonschema.exceptions import best_match

        fault = best_match(self._arguments.iter_errors(dict(arguments)))
        if fault is not None:
            place = ".".join(map(str, fault.absolute_path)) or "arguments"
            raise ToolArgumentError(f"{self.name} was called with wrong arguments: {place}: {fault.message[:400]}")


def _validator(listed: Listed) -> Validator:
    """A validator of the tool's arguments; references to other documents are not followed.

    Raises:
        ValueError: what the tool calls its schema is none.
    """
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(listed.input_schema)
    try:
        kind.check_schema(listed.input_schema)
    except SchemaError as error:
        shown = json.dumps(listed.input_schema)[:200]
        raise ValueError(f"the MCP tool {listed.name} has arguments of no JSON schema: {error.message} in {shown}") from error
    return kind(listed.input_schema, registry=Registry())
