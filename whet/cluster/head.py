"""A Ray cluster of one node that is one run's alone: both sides of the process that starts it.

`python -m whet.cluster.head NUM_CPUS` starts the cluster and says its address. It runs under a keeper (`whet.calls.keeper`), which ends
every process of the cluster, and all that was started there, when the starter's end of a socket is closed: as the run ends, however
that is.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from whet.calls import keeper
from whet.cluster.process import in_words

STORE_BYTES = 100_000_000
"""Size of the object store: nothing large goes through it."""
ADDRESS = "whet: the cluster is at "
"""Begin of the line with the cluster's address."""
LAST_LINES = 20
"""Number of lines of its output that are kept."""
LOOK_S = 0.2
END_S = keeper.END_S + 5.0
"""For the cluster to be gone."""


def private(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a cluster is this run's alone: it asks for a new key, listens on the loopback interface alone, and reports
    to nobody. What was set of that is replaced: it was for another cluster.

    Args:
        environment: environment of this process.
    """
    kept = {key: value for key, value in environment.items() if key not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH")}
    return {
        **kept,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: "0" is how Ray learns that a node's address is loopback
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@contextmanager
def cluster_here(num_cpus: int, timeout_s: float) -> Iterator[str]:
    """A cluster that ends with the block; meanwhile this process's environment has its key. Gives its address.

    Args:
        num_cpus: processors that it counts.
        timeout_s: for it to start.

    Raises:
        ValueError: if it does not start.
    """
    with _environment(os.environ, private(os.environ)):
        control, theirs = socket.socketpair()
        head = (sys.executable, "-m", "whet.cluster.head", str(num_cpus))
        with control, theirs:
            child = subprocess.Popen(
                (sys.executable, "-I", "-S", keeper.__file__, str(theirs.fileno()), *head),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # no key of the terminal's reaches it
            )
            theirs.close()
            try:
                yield _Output(child).address(timeout_s)
            finally:
                control.shutdown(socket.SHUT_RDWR)
                try:
                    child.wait(END_S)
                except subprocess.TimeoutExpired:  # somebody stopped the keeper: the cluster dies with it
                    child.kill()
                    child.wait()


@contextmanager
def _environment(mine: MutableMapping[str, str], other: Mapping[str, str]) -> Iterator[None]:
    before = dict(mine)
    changed = {key for key in before.keys() | other.keys() if before.get(key) != other.get(key)}

    def take(values: Mapping[str, str]) -> None:
        for key in changed:
            if key in values:
                mine[key] = values[key]
            else:
                mine.pop(key, None)

    take(other)
    try:
        yield
    finally:
        take(before)


class _Output:
    """Output of the head."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child, self._last = child, deque[str](maxlen=LAST_LINES)
        self._address: str | None = None
        self._started = threading.Event()
        self._reading = threading.Thread(target=self._read, name="whet cluster", daemon=True)
        self._reading.start()

    def address(self, timeout_s: float) -> str:
        """Raises ValueError if it does not say one in time."""
        deadline = time.monotonic() + timeout_s
        while not self._started.wait(LOOK_S):
            if (code := self._child.poll()) is not None:
                self._reading.join(LOOK_S)
                raise ValueError(f"Ray could not start a cluster on this machine: its process {in_words(code)}{self._last_output()}")
            if time.monotonic() > deadline:
                raise ValueError(
                    f"Ray started no cluster on this machine within {timeout_s:g} s (cluster.start_timeout_s){self._last_output()}"
                )
        assert self._address is not None
        return self._address

    def _last_output(self) -> str:
        return "; its last output:\n    " + "\n    ".join(self._last) if self._last else "; it printed nothing"

    def _read(self) -> None:
        assert self._child.stdout is not None
        with self._child.stdout:
            for raw in self._child.stdout:
                line = raw.decode(errors="replace").rstrip("\r\n")
                if line.startswith(ADDRESS):
                    self._address = line.removeprefix(ADDRESS)
                    self._started.set()
                elif line.strip():
                    self._last.append(line)


def main() -> None:
    """Be a cluster until the keeper ends it."""
    import ray

    ray.init(
        address="local",
        num_cpus=int(sys.argv[1]),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=STORE_BYTES,
    )
    print(f"{ADDRESS}{ray.get_runtime_context().gcs_address}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
