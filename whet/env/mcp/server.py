"""A server that speaks the Model Context Protocol, as the settings describe it: a program over its pipes, or an address."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from whet.config import ConfigError
from whet.env.mcp.pipes import CommandRoom, messages, started
from whet.runfolder.child_environment import child_environment

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import Tool as Listed

PLACES = ("HOME", "TMPDIR", "TEMP", "TMP", "PWD")
"""Variables whose folders a sandbox has of its own."""
MAX_TOOLS, MAX_TOOL_CHARS = 512, 65536
"""Tools of one server, and the JSON of each of them."""
MAX_PAGES = 64


class ServerFailed(Exception):
    """A server ended, answered nonsense, or offers other tools than before. The text names it and has its last words."""


@dataclass(frozen=True, slots=True)
class McpServer:
    """A server of tools.

    Raises:
        ValueError: it has no command and no address, or both, or a variable of the environment is not set.
    """

    command: tuple[str, ...] = ()
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables of the program's environment by name; a value `$NAME` is the variable NAME of this process."""
    headers_env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Headers of requests to the address: for each the variable of this process's environment that holds its value."""
    start_timeout_s: float = 60.0
    """Seconds to start, to shake hands, and to list the tools."""
    room: CommandRoom | None = None
    """The sandbox of the program; None: it has the rights of this process."""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise ValueError('an MCP server has either a command, command = ["npx", "-y", "..."], or an address, url = "https://.../mcp"')
        if self.url and (self.env or urlsplit(self.url).scheme not in ("http", "https")):
            raise ValueError("the url of an MCP server begins with http:// or https://, and env belongs to a command")
        if self.command and self.headers_env:
            raise ValueError("headers_env belongs to the url of an MCP server; a command takes env")
        if self.command and shutil.which(self.command[0], path=self.environment.get("PATH")) is None:
            raise ValueError(f"there is no program {self.command[0]!r} to start as an MCP server; install it, or write its whole path")
        self._headers()

    @property
    def name(self) -> str:
        """The server in errors: its command, or its address without a password."""
        if self.command:
            return " ".join(self.command)
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the program: paths and languages, and the named variables."""
        named = {name: _variable(value[1:]) if value.startswith("$") else value for name, value in self.env.items()}
        found = child_environment()
        if self.room is not None:
            found = {name: value for name, value in found.items() if name not in PLACES and not name.startswith("XDG_")}
        return found | named

    def _headers(self) -> dict[str, str]:
        return {header: _variable(name) for header, name in self.headers_env.items()}

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[McpSession]:
        """A new session with the server. The program and all that it started end with it.

        Raises:
            ServerFailed: it could not be started, or did not shake hands in time.
        """
        session: McpSession | None = None
        last_words: Callable[[], str] = str
        try:
            async with self._transport() as (transport, last_words), self._client(transport) as client:
                session = McpSession(self, client, last_words)
                yield session
        except Exception as error:  # of another process
            if session is not None:
                raise innermost(error) from None  # the SDK's task groups put errors into groups
            raise ServerFailed(f"the MCP server {self.name} could not be started: {_with(error, last_words())}") from error

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[tuple[Any, Callable[[], str]]]:
        """The transport of a session's messages, and a function for the last words of its program."""
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        if self.command:
            async with started(self.command, self.environment, self.room) as pipes:
                yield messages(pipes), pipes.last_words
            return
        async with create_mcp_http_client(self._headers()) as http:  # follows no redirect to another origin
            yield streamable_http_client(self.url, http_client=http), str

    @asynccontextmanager
    async def _client(self, transport: Any) -> AsyncIterator[Client]:
        from mcp import Client
        from mcp_types import ElicitResult

        async def decline(context: object, parameters: object) -> ElicitResult:
            return ElicitResult(action="decline")

        options: dict[str, Any] = {"read_timeout_seconds": self.start_timeout_s, "elicitation_callback": decline, "cache": None}
        async with Client(transport, **options) as client:
            yield client


@dataclass(frozen=True, slots=True)
class McpSession:
    """A session with a server. Several calls may run at a time."""

    server: McpServer
    client: Client
    last_words: Callable[[], str]

    async def list_tools(self) -> dict[str, Listed]:
        """The server's tools by name.

        Raises:
            ServerFailed: there are too many of them, or one is too long.
        """
        found: dict[str, Listed] = {}
        cursor: str | None = None
        for _ in range(MAX_PAGES):
            page = await self.client.list_tools(cursor=cursor)
            for tool in page.tools:
                if tool.name in found:
                    raise ServerFailed(f"the MCP server {self.server.name} has two tools named {tool.name!r}")
                if (size := len(_text_of(tool))) > MAX_TOOL_CHARS:
                    raise ServerFailed(f"the MCP server {self.server.name}: the tool {tool.name!r} has {size} characters")
                found[tool.name] = tool
            cursor = page.next_cursor
            if len(found) > MAX_TOOLS:
                break
            if cursor is None:
                return found
        raise ServerFailed(f"the MCP server {self.server.name} lists more than {MAX_TOOLS} tools")

    def failed(self, what: str, error: BaseException) -> ServerFailed:
        """The error of a session: `what` could not be done."""
        return ServerFailed(f"the MCP server {self.server.name} failed in {what}: {_with(error, self.last_words())}")


def digest_of(tool: Listed) -> str:
    """Hash of all that the model reads of a tool."""
    return hashlib.sha256(_text_of(tool).encode()).hexdigest()


def changes(before: Mapping[str, str], tools: Mapping[str, Listed], names: Sequence[str]) -> str:
    """Words for how tools differ from their digests `before`, among `names`; "": they do not."""
    now = {name: digest_of(tools[name]) for name in names if name in tools}
    parts = [f"{name} is gone" for name in names if name not in now]
    parts += [f"{name} has another description or schema" for name in now if before[name] != now[name]]
    return ", ".join(parts)


def innermost(error: BaseException) -> BaseException:
    """The first error of a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _with(error: BaseException, words: str) -> str:
    found = innermost(error)
    return f"{type(found).__name__}: {found}" + (f"; its last words: {words}" if words else "")


def require_mcp() -> None:
    """See that the package is there.

    Raises:
        ConfigError: it is not, or is too old.
    """
    if find_spec("mcp") is None or version("mcp").split(".")[0] != "2":
        raise ConfigError(['tools of MCP servers need the package mcp in version 2: pip install "whet[mcp]"'])


def _variable(name: str) -> str:
    if name not in os.environ:
        raise ValueError(f"the environment variable {name}, which an MCP server is to be given, is not set")
    return os.environ[name]


def _text_of(tool: Listed) -> str:
    return json.dumps([tool.name, tool.description, tool.input_schema], sort_keys=True, ensure_ascii=False)
