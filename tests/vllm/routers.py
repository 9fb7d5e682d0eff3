"""Routers of others before servers: how each is started, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.vllm.servers import python
from whet.engine.servers.hosts import free_port
from whet.engine.servers.start import answers

MANUAL = ["--policy", "manual", "--assignment-mode", "min_group"]
STICKY = {"smg": MANUAL, "sglang_router": MANUAL, "vllm_router": ["--policy", "sticky_least_loaded"]}
"""Each router's arguments by which a conversation stays at one server, and begins at that of the fewest."""
READY_S = 60.0


@contextmanager
def router(name: str, urls: Sequence[str]) -> Iterator[str]:
    """The address of a router before servers."""
    port = free_port()
    command = [python(), "-m", f"{name}.launch_router", "--host", "127.0.0.1", "--port", str(port), *STICKY[name]]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", *urls]
    folder = Path(python()).parents[1] / "routers" / name.replace("_", "-")
    variables = {**os.environ, "PYTHONPATH": str(folder)}
    # No pipe: one that nobody reads fills, and the router waits in the middle of a stream.
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
    try:
        while not answers(f"{url}/health") or not answers(f"{url}/readiness"):
            assert process.poll() is None and time.monotonic() < deadline, f"{name} did not start"
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
