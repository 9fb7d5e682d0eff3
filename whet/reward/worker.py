"""The child side of the worker pool: `python -m whet.reward.worker`.

Reads one call per line (`whet/calls/lines.py`) from the stdin it was started with and answers each with one line on
the stdout it was started with. Code that runs here sees neither: its stdin is empty, its prints go to stderr.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Mapping
from typing import BinaryIO

from whet.calls.lines import answer, decode
from whet.calls.messages import RemoteCall
from whet.calls.methods import Target
from whet.config import resolve
from whet.env.failure import traceback_of
from whet.reward.pool import WORKER
from whet.types import JSON

KILL_GRACE_S = 5.0
"""The kernel ends a call this long after its deadline, should the parent no longer be there to do it."""


def main() -> None:
    requests, replies = _take_pipes()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()
    targets = {WORKER: Target(RewardWorker(), RewardWorker)}
    while True:
        call = decode(lines.get())
        assert isinstance(call, RemoteCall) and call.timeout_s is not None
        signal.setitimer(signal.ITIMER_REAL, call.timeout_s + KILL_GRACE_S)
        line = answer(targets, call, traceback_of)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(line)
        replies.flush()


class RewardWorker:
    """Calls of the pool."""

    def start(self, sys_path: list[str], memory_mb: int, preload: list[str]) -> None:
        """Get ready for calls. Arguments as for `WorkerPool`."""
        sys.path[:] = sys_path
        if memory_mb and sys.platform == "linux":
            import resource

            limit = memory_mb * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        for reference in preload:
            resolve(reference)

    def run(self, function: str, arguments: Mapping[str, JSON]) -> JSON:
        """Call a function of the settings, by its import reference."""
        return resolve(function)(**arguments)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the two pipes under other, uninherited descriptors, so that a stray print cannot write a reply."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, replies


def _read(requests: BinaryIO, lines: queue.SimpleQueue[bytes]) -> None:
    for line in requests:
        lines.put(line)
    os._exit(0)  # the parent is gone: nobody waits for the call that may still be running


if __name__ == "__main__":
    main()
