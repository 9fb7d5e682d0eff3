"""Stacks of a process's threads: as it reports them itself, on a signal, or as py-spy sees them."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading

from whet.runfolder.child_environment import child_environment

TIMEOUT_S = 2.0
"""For a process to say where its threads are."""
SAY_STACKS = signal.SIGUSR1
"""The signal on which a process of a run writes the stacks of its threads."""
SAY_HELD_STACKS = signal.SIGUSR2
"""On this one it writes them as faulthandler's own handler does, for which nobody needs the GIL: see `say_on_signal` for the risk."""
STACK_MARK = "whet stacks> "
"""Begins each line of them, where a process says them among other words; one with nothing else is the last."""


def own_stacks() -> str:
    """Stacks of all threads of this process."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def say_on_signal() -> None:
    """From now on this process says its stacks on `SAY_STACKS`, to standard error, each line after `STACK_MARK`. From its main thread.

    A thread says them that holds the GIL. faulthandler's own handler of a signal reads the frames of threads that go on meanwhile, and
    can crash a process that nothing is wrong with (a frame that was left is read where its memory was given back): it is for a process
    that will be killed anyway.
    """
    faulthandler.register(SAY_HELD_STACKS, all_threads=True)
    rung, ring = socket.socketpair()
    ring.setblocking(False)
    signal.set_wakeup_fd(ring.detach(), warn_on_full_buffer=False)  # written to as the signal comes, whatever the main thread does
    signal.signal(SAY_STACKS, lambda *_: None)
    signal.siginterrupt(SAY_STACKS, False)
    threading.Thread(target=_say, args=(rung,), name="stacks", daemon=True).start()


def _say(rung: socket.socket) -> None:
    while numbers := rung.recv(1):
        if numbers[0] == SAY_STACKS:
            try:
                lines = [*filter(None, own_stacks().splitlines())]
            except OSError as error:  # no room on the disk, no descriptor free: the next time there may be
                lines = [f"they cannot be written: {error}"]
            for line in [*lines, ""]:
                os.write(sys.stderr.fileno(), f"{STACK_MARK}{line}\n".encode())  # a line in one call: other output comes between lines


def spied(pid: int) -> str:
    """The stacks of a process of this machine that does not say them, where py-spy is installed and may look; else nothing."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if spy is None:
        return ""
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=child_environment()).stdout
    except subprocess.TimeoutExpired:
        return ""
