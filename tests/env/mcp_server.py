"""An MCP server for tests, over its pipes or, with a port as argument, over HTTP: python mcp_server.py [PORT]."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import Context, MCPServer
from mcp_types import ImageContent, TextContent
from pydantic import BaseModel

server = MCPServer("tests")
notes: list[str] = []


@server.tool(description=os.environ.get("ADDS", "Adds two numbers."))
def add(a: int, b: int = 1) -> str:
    return str(a + b)


@server.tool()
def note(text: str) -> str:
    """Keeps a text, and tells all of this session."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
def table() -> dict[str, Any]:
    """Structured content."""
    return {"rows": [1, 2]}


@server.tool()
def picture() -> list[TextContent | ImageContent]:
    """An image."""
    return [TextContent(type="text", text="Look:"), ImageContent(type="image", data="AAAA", mime_type="image/png")]


@server.tool()
def fail() -> str:
    """Fails."""
    raise ValueError("hidden")


@server.tool()
def variables() -> str:
    """Names of the variables of the environment."""
    return " ".join(sorted(os.environ))


@server.tool()
async def hang() -> str:
    """Never answers."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def crash() -> str:
    """Ends the server."""
    print("out of cheese", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def garbage() -> str:
    """Writes what is no message, and then ends."""
    os.write(1, b"{{{ no json\n")
    os._exit(0)


@server.tool()
def spawn(path: str) -> str:
    """Starts processes that outlive it, one in a session of its own."""
    sleeps, null = [sys.executable, "-c", "import time; time.sleep(600)"], subprocess.DEVNULL
    children = [subprocess.Popen(sleeps, start_new_session=own, stdin=null, stdout=null) for own in (True, False)]
    Path(path).write_text(" ".join(str(child.pid) for child in children))
    return "started"


class Name(BaseModel):
    """What is asked for."""

    name: str


@server.tool()
async def ask(context: Context) -> str:
    """Asks the user."""
    answer = await context.elicit("Who are you?", Name)
    return answer.action


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
