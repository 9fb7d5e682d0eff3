"""Where the threads of a process are: as it says itself, on a signal, or as py-spy sees it."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile

TIMEOUT_S = 2.0
"""For a process to say where its threads are."""
SAY_STACKS = signal.SIGUSR1
"""The signal on which a process of a run writes the stacks of its threads."""


def own_stacks() -> str:
    """Of this process, all threads."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def spied(pid: int) -> str:
    """The stacks of a process of this machine that does not say them, where py-spy is installed and may look; else nothing."""
    spy = shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))
    if spy is None:
        return ""
    command = [spy, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout
    except subprocess.TimeoutExpired:
        return ""
