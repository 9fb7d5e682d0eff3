"""Places of the environments that `make test-agents` makes."""

import asyncio
import os
import socket
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

from whet.data.parsers import Parsed
from whet.types import Message, ToolCall

AGENTS = Path(os.environ.get("WHET_TEST_AGENTS", ".agents")).absolute()
NODE = AGENTS / "node" / "node_modules" / "@modelcontextprotocol"


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def serving(command, port):
    """A server that answers on the port."""
    server = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()


def says(text, *calls):
    """A reply of a model, with calls of tools by name and arguments."""
    return Parsed(Message("assistant", text, tuple(ToolCall(name, arguments, str(i)) for i, (name, arguments) in enumerate(calls))))


def run(coroutine, seconds=240):
    """Run it, for so many seconds at most."""

    async def bounded():
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(bounded())
