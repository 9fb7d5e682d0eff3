"""Torch's threads on a busy machine: if several are slower than one, the user gets a message."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

TOO_SLOW = 2.0
"""Ratio to the time with one thread from which the message is shown."""
SPEEDS = ("tokens_per_second/update", "tokens_per_second/rollout")
STEPS = 8
"""Steps that a step's speed is compared with."""


def slowdown(threads: int, seconds: float = 0.2) -> float:
    """Measure small products and sums with `threads` threads and with one.

    Args:
        threads: number of torch's threads.
        seconds: at most, for each of the two.

    Returns:
        The time with `threads` threads over the time with one; below 1 they help.
    """
    if threads == 1:
        return 1.0
    before = torch.get_num_threads()
    try:
        many, one = (_seconds_of(count, seconds) for count in (threads, 1))
    finally:
        torch.set_num_threads(before)
    return many / one


def _seconds_of(threads: int, limit: float) -> float:
    """The mean seconds of a chain of small operations."""
    torch.set_num_threads(threads)
    left, right = torch.full((64, 256), 1e-3), torch.full((256, 256), 1e-3)
    torch.relu(left @ right)  # starts the threads
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < limit and count < 40:
        out = left
        for _ in range(8):
            out = torch.relu(out @ right)
        count += 1
    return spent / max(count, 1)


class ThreadWatch:
    """Notices at a run's start, and when its steps slow down, that torch's threads hold each other up.

    Args:
        on_cpu: True if the model is computed there; elsewhere nothing is measured.
        measure: `slowdown` of torch's present number of threads.
    """

    def __init__(self, *, on_cpu: bool, measure: Callable[[], float] | None = None) -> None:
        self._on_cpu = on_cpu
        self._measure = measure or (lambda: slowdown(torch.get_num_threads()))
        self._speeds = {name: deque[float](maxlen=STEPS) for name in SPEEDS}
        self._has_warned = False

    def at_start(self) -> list[str]:
        """Measure once; a line if several threads are slower than one."""
        return self._warning("") if self._on_cpu else []

    def after_step(self, values: Mapping[str, float]) -> list[str]:
        """Look at a step's speeds; measure if one is below half of the median of the last steps.

        Args:
            values: the step's metrics.
        """
        slow = ""
        for name, earlier in self._speeds.items():
            if name not in values:
                continue
            if len(earlier) == STEPS and values[name] < statistics.median(earlier) / 2:
                slow = f"{name} fell from {statistics.median(earlier):.0f} to {values[name]:.0f}: "
            earlier.append(values[name])
        return self._warning(slow) if slow and self._on_cpu and not self._has_warned else []

    def _warning(self, cause: str) -> list[str]:
        times = self._measure()
        if times < TOO_SLOW:
            return []
        self._has_warned = True
        policy = os.environ.get("OMP_WAIT_POLICY", "not set")
        remedy = "" if policy == "PASSIVE" else f" with OMP_WAIT_POLICY=PASSIVE in the environment (it is {policy}), or"
        return [
            f"{cause}torch's {torch.get_num_threads()} threads take {times:.1f} times as long as one, since other work runs on this "
            f"machine: start again{remedy} with threads=1 (other numbers of threads give other bits)"
        ]
