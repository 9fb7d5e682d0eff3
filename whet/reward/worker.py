"""The child side of the worker pool: `python -m whet.reward.worker`.

Reads one JSON request per line from the stdin it was started with and answers each with one JSON line on the
stdout it was started with. Code that runs here sees neither: its stdin is empty, its prints go to stderr.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from typing import BinaryIO

from whet.config import resolve
from whet.env.failure import traceback_of
from whet.types import JSON

KILL_GRACE_S = 5.0
"""The kernel ends a call this long after its deadline, should the parent no longer be there to do it."""


def main() -> None:
    requests, replies = _take_pipes()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, lines), daemon=True).start()
    _reply(replies, _answer(_start, json.loads(lines.get())))
    while True:
        request = json.loads(lines.get())
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + KILL_GRACE_S)
        answer = _answer(_call, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, answer)


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


def _start(request: JSON) -> JSON:
    sys.path[:] = request["sys_path"]
    if request["memory_mb"] and sys.platform == "linux":
        import resource

        limit = request["memory_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for reference in request["preload"]:
        resolve(reference)


def _call(request: JSON) -> JSON:
    return resolve(request["function"])(**request["arguments"])


def _answer(function: object, request: JSON) -> bytes:
    assert callable(function)
    try:
        return json.dumps({"value": function(request)}).encode()
    except Exception as error:  # a user's function may raise anything; the parent raises it again, with its traceback
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno} in {frame.name}"
        failure = {"kind": type(error).__name__, "message": str(error), "where": where, "traceback": traceback_of(error)}
        return json.dumps(failure).encode()


def _reply(replies: BinaryIO, answer: bytes) -> None:
    replies.write(answer + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
