"""Runs a command in a process group of its own and ends the group when standard input ends: no server outlives the run that started it,
whatever ends that. If this process is killed itself, as a cluster kills what its workers started, a second process ends the group. Standard
library only; run by the Python of the command's environment, or by that of a cluster's node.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

GRACE_S = 10.0
LOOK_S = 0.1


def main() -> None:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    done = watched(child.pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run to answer
    signal.signal(signal.SIGTERM, lambda *_: end(child))
    threading.Thread(target=wait_for_the_end, args=(child,), daemon=True).start()
    code = child.wait()
    kill(child)  # what it left behind
    with suppress(OSError):
        os.write(done, b".")
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)


def watched(group: int) -> int:
    """Start a process that ends a process group when this process is killed.

    Returns:
        A pipe for a byte that says that the group has ended.
    """
    read, write = os.pipe()
    if os.fork():
        os.close(read)
        return write
    try:
        os.close(write)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):  # a reader of the server's output sees its end
            os.dup2(null, number)
        if not os.read(read, 1):
            end_group(group)
    finally:
        os._exit(0)


def end_group(group: int) -> None:
    """Have a process group end by itself, or else kill it."""
    deadline = time.monotonic() + GRACE_S
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(group, signal.SIGTERM)
        while time.monotonic() < deadline:
            time.sleep(LOOK_S)
            os.killpg(group, 0)
        os.killpg(group, signal.SIGKILL)


def wait_for_the_end(child: subprocess.Popen[bytes]) -> None:
    sys.stdin.buffer.read()
    end(child)


def end(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    timer = threading.Timer(GRACE_S, kill, (child,))
    timer.daemon = True
    timer.start()


def kill(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()
