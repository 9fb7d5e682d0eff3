"""Small operations with two threads of torch's beside busy processes, by how the threads wait: `python benchmarks/thread_waiting.py`.

Each figure is of a process of its own, since the policy is read when torch is loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

MEASURED = """
import time, whet, torch
torch.set_num_threads(THREADS)
x, w = torch.full((64, 256), 1e-3), torch.full((256, 256), 1e-3)
torch.relu(x @ w)
count, began = 0, time.perf_counter()
while time.perf_counter() - began < 3:
    out = x
    for _ in range(8):
        out = torch.relu(out @ w)
    count += 1
print((time.perf_counter() - began) / count)
"""


def spin() -> None:
    """Keep a core busy."""
    while True:
        pass


def seconds(threads: int, policy: str) -> float:
    """The mean seconds of a chain in a process of its own."""
    environment = {**os.environ, "OMP_WAIT_POLICY": policy}
    environment.pop("OMP_NUM_THREADS", None)
    told = subprocess.run(
        [sys.executable, "-c", MEASURED.replace("THREADS", str(threads))],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return float(told.stdout)


def main() -> None:
    for num_busy in (0, 1, 2):
        busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(num_busy)]
        for process in busy:
            process.start()
        one = seconds(1, "PASSIVE")
        for policy in ("ACTIVE", "PASSIVE"):
            two = seconds(2, policy)
            print(f"{num_busy} busy processes, two threads, {policy}: {two * 1e3:.2f} ms, {two / one:.2f} times as long as one thread")
        for process in busy:
            process.kill()


if __name__ == "__main__":
    main()
