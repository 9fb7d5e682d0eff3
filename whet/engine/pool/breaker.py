"""A circuit breaker (Nygard, Release It!, 2007): who fails again and again is left alone for a while, then tried with one request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

MOST_DOUBLED = 5
"""Times that the wait doubles."""


class Breaker:
    """Closed: all may pass. Open: nobody. Half-open: one, on whose success it closes and on whose failure it opens for twice as long.

    Args:
        failures: in a row, until it opens.
        open_s: seconds that it is open for at first.
        clock: seconds that only go forward.
    """

    def __init__(self, failures: int, open_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._open_s, self._clock = failures, open_s, clock
        self._failures = 0
        self._opened = 0
        """Times in a row that it opened."""
        self._until: float | None = None
        """When it is half-open; None: it is closed."""
        self._num_passed = 0
        self._trial: int | None = None
        """The request that tries, while it is half-open."""

    @property
    def state(self) -> Literal["closed", "open", "half_open"]:
        if self._until is None:
            return "closed"
        return "open" if self._clock() < self._until else "half_open"

    @property
    def lets_pass(self) -> bool:
        """True if one more request may pass."""
        return self._until is None or (self._clock() >= self._until and self._trial is None)

    def passed(self) -> int:
        """A request goes through; while it is half-open no other may until that one has ended.

        Returns:
            Its number, by which it says how it went: what began before it opened neither closes it nor keeps it open.
        """
        self._num_passed += 1
        if self._until is not None:
            self._trial = self._num_passed
        return self._num_passed

    def succeeded(self, number: int) -> None:
        if self._counts(number):
            self._failures = self._opened = 0
            self._until = None

    def failed(self, number: int) -> bool:
        """Returns whether that is worth telling: it is the first failure in a row, or the last one until it opens."""
        if not self._counts(number):
            return False
        self._failures += 1
        if self._failures >= self._limit or self._until is not None:
            self._until = self._clock() + self._open_s * 2 ** min(self._opened, MOST_DOUBLED)
            self._opened += 1
        return self._failures == 1 or self._until is not None

    def ended(self, number: int) -> None:
        """A request that went through has ended, with or without telling anything."""
        if number == self._trial:
            self._trial = None

    def _counts(self, number: int) -> bool:
        return self._until is None or number == self._trial
