"""Stopping on Ctrl-C and SIGTERM: the first asks the run to end where its state is whole, the second ends the process at once."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOGETHER_S = 0.5
"""Signals that come within this time are one: `timeout` and other programs that start a run pass on what the terminal or they themselves
have already sent to all of its processes."""
SHOW_CURSOR = "\x1b[?25h"


class Stopped(Exception):
    """A signal asked the run to end, and it did, with its state whole."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.exit_status = 128 + number


class Stop:
    """Request to end the run. Made by `on_signals`; without a signal it is never set."""

    def __init__(self) -> None:
        self._number: signal.Signals | None = None
        self._wake: Callable[[], object] | None = None

    @property
    def asked(self) -> bool:
        return self._number is not None

    def ask(self, number: signal.Signals) -> None:
        """Ask the run to end. Safe in a signal handler."""
        self._number = number
        if self._wake is not None:
            self._wake()

    def check(self) -> None:
        """Raise if the run was asked to end.

        Raises:
            Stopped: if the run was asked to end.
        """
        if self._number is not None:
            raise Stopped(self._number)

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, unless the run is asked to end first: then it is cancelled and has
        ended before this raises.

        Raises:
            Stopped: if the run was asked to end.
        """
        loop = asyncio.get_running_loop()
        asked = asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(asked.set)
        if self.asked:
            asked.set()
        working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(asked.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                self.check()
            return await working
        finally:
            self._wake = None
            for task in (working, waiting):
                task.cancel()
            await asyncio.gather(working, waiting, return_exceptions=True)


_outermost: Stop | None = None
"""Stop of the outermost active `on_signals`: inner ones share it, so that a signal ends all of them."""


@contextmanager
def on_signals(*, leaves: bool = True) -> Iterator[Stop]:
    """Handle Ctrl-C and SIGTERM meanwhile. Outside the main thread, where Python has no signals, nothing ever asks.

    `leaves`: a second Ctrl-C ends the process at once; false: a notebook's process has more to lose than the run, so it never does.
    """
    global _outermost
    if _outermost is not None:
        yield _outermost
        return
    stop, first_s = Stop(), -math.inf

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_s
        name = signal.Signals(number).name
        if time.monotonic() - first_s < TOGETHER_S:
            return
        first_s = time.monotonic()
        if stop.asked and number == signal.SIGINT and not leaves:
            _say("the run is still saving; to leave it at once, restart the kernel: the newest checkpoint stays")
            return
        if stop.asked:
            _say(f"{SHOW_CURSOR if sys.stderr.isatty() else ''}{name} again: left at once, nothing was saved now")
            os._exit(128 + number)
        stop.ask(signal.Signals(number))
        _say(f"{name}: the run saves and ends as soon as its state is whole; once more ends it at once")

    try:
        before = {number: signal.signal(number, handle) for number in SIGNALS}
    except ValueError:  # not the main thread
        yield stop
        return
    _outermost = stop
    try:
        yield stop
    finally:
        _outermost = None
        for number, handler in before.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    """Straight to the descriptor: in a signal handler, a buffered stream may be in the middle of a write."""
    with suppress(OSError):  # nobody listens any more: the run ends as it was asked to all the same
        os.write(2, f"\n{text}\n".encode())
