"""Seconds of calls in sandboxes: `python benchmarks/sandbox.py [NUM_AT_ONCE]`; one call after another, and many sandboxes at once."""

import asyncio
import statistics
import sys
import time

from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.local import LocalSandbox
from whet.env.sandbox.probe import choose, rung_of

CALLS = 50


async def measure(name, at_once):
    rung = rung_of(name, choose().rung.launch)
    began = time.perf_counter()
    sandbox = await LocalSandbox.open(rung, SandboxConfig())
    opened = time.perf_counter() - began
    for command in (["true"], ["python", "-I", "-S", "-c", ""]):
        seconds = []
        for _ in range(CALLS):
            began = time.perf_counter()
            await sandbox.exec(command)
            seconds.append(time.perf_counter() - began)
        print(f"{name}: {command[0]} median {1e3 * statistics.median(seconds):.1f} ms, best {1e3 * min(seconds):.1f} ms")
    await sandbox.close()
    began = time.perf_counter()
    sandboxes = await asyncio.gather(*(LocalSandbox.open(rung, SandboxConfig()) for _ in range(at_once)))
    ready = time.perf_counter()
    await asyncio.gather(*(one.exec(["true"]) for one in sandboxes))
    called = time.perf_counter()
    await asyncio.gather(*(one.close() for one in sandboxes))
    closed = time.perf_counter()
    print(
        f"{name}: one opened in {1e3 * opened:.0f} ms; {at_once} at once: opened in {ready - began:.2f} s, a call in each "
        f"{called - ready:.2f} s ({1e3 * (called - ready) / at_once:.1f} ms a call), closed in {closed - called:.2f} s"
    )


if __name__ == "__main__":
    for way in ("namespaces", "landlock"):
        asyncio.run(measure(way, int(sys.argv[1]) if len(sys.argv) > 1 else 64))
