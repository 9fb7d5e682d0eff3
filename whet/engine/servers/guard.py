"""Runs a command in a process group of its own and ends the group when standard input ends: no server outlives the run that started it,
whatever ends that. Standard library only; run by the Python of the command's environment.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE_S = 10.0


def main() -> None:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run to answer
    signal.signal(signal.SIGTERM, lambda *_: end(child))
    threading.Thread(target=wait_for_the_end, args=(child,), daemon=True).start()
    code = child.wait()
    kill(child)  # what it left behind
    sys.stdout.flush()
    os._exit(code if code >= 0 else 128 - code)


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
