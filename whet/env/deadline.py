"""When a trajectory's time is over. What it spends waiting while all sampling is suspended does not count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class Pauses:
    """Time for which sampling was suspended so far, by the event loop's clock."""

    ended_s: float = 0.0
    """In the pauses that are over."""
    began: float | None = None
    """When the present one began."""

    def begin(self) -> None:
        if self.began is None:
            self.began = asyncio.get_running_loop().time()

    def end(self) -> None:
        self.ended_s, self.began = self.total_s, None

    @property
    def total_s(self) -> float:
        return self.ended_s + (0.0 if self.began is None else asyncio.get_running_loop().time() - self.began)


@dataclass(frozen=True, slots=True)
class Deadline:
    """When a trajectory's time is over. Made inside the event loop; None: never."""

    timeout_s: float | None = None
    at: float | None = None
    """End of the trajectory's time, by the event loop's clock less `pauses`. None: each wait for the
    environment or the reward has its own `timeout_s`, and the engine may take any time."""
    pauses: Pauses = field(default_factory=Pauses)

    @classmethod
    def after(cls, timeout_s: float | None, *, per_wait: bool = False, pauses: Pauses | None = None) -> Deadline:
        """A deadline `timeout_s` from now, or one for each wait."""
        pauses = pauses or Pauses()
        if timeout_s is None or per_wait:
            return cls(timeout_s, None, pauses)
        return cls(timeout_s, asyncio.get_running_loop().time() - pauses.total_s + timeout_s, pauses)

    @property
    def left_s(self) -> float | None:
        if self.at is None:
            return None
        return max(0.0, self.at + self.pauses.total_s - asyncio.get_running_loop().time())

    def error(self, place: str) -> TimeoutError:
        """Error of a trajectory whose time ended while it waited for `place`."""
        what = f"the trajectory's {self.timeout_s} s (rollout.timeout_s)"
        return TimeoutError(f"{what} were over while it waited for {place}")

    @asynccontextmanager
    async def ends(self, place: str) -> AsyncIterator[None]:
        """Cancel what is awaited inside once the time is over, and raise `error(place)`. A pause meanwhile counts: it holds up the engine
        alone."""
        limit = asyncio.timeout(self.timeout_s if self.at is None else self.left_s)
        try:
            async with limit:
                yield
        except TimeoutError as late:
            if limit.expired():
                raise self.error(place) from late
            raise
