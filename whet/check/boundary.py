"""Calls to the user's code, with a deadline. An exception or a hang becomes a `UserFault` that names the
place.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

from whet.config import place_in

T = TypeVar("T")

CANCEL_S = 5.0
"""Seconds for a coroutine to be cancelled after its deadline; one that blocks takes them all."""


class UserFault(ValueError):
    """The user's code raised or did not return; the text names the place."""


def run_user_code(what: str, work: Callable[[], T], deadline_s: float) -> T:
    """Result of `work`, computed on a daemon thread: a hang costs the deadline, not the process.

    Raises:
        UserFault: it raised or was not done in time. Errors of whet's own keep their text; any other has its
            type and the innermost place in the user's files.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def body() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:  # a user's code may raise anything, SystemExit too; it is reported below
            outcome.append((None, error))

    thread = threading.Thread(target=body, name="whet-check", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not outcome:
        assert thread.ident is not None
        where = place_in(traceback.extract_stack(sys._current_frames().get(thread.ident)), installed=False)
        raise UserFault(f"{what} took longer than {deadline_s:g} s{where}")
    result, error = outcome[0]
    if error is not None:
        raise UserFault(_tell(what, error)) from error
    return result  # pyright: ignore[reportReturnType]


def run_user_coroutine(what: str, work: Callable[[], Awaitable[T]], deadline_s: float) -> T:
    """As `run_user_code`, for a coroutine. It is cancelled at its deadline; one that blocks is left alone.

    Raises:
        UserFault: as there.
    """

    async def timed() -> T:
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                return await work()
        except TimeoutError as late:
            if limit.expired():
                raise UserFault(f"{what} took longer than {deadline_s:g} s{_place_of_error(late)}") from late
            raise

    return run_user_code(what, lambda: asyncio.run(timed()), deadline_s + CANCEL_S)


def _tell(what: str, error: BaseException) -> str:
    place = _place_of_error(error)
    if type(error).__module__.startswith("whet.") or (isinstance(error, ValueError) and not place):
        return str(error)  # whet's own error, which names its place
    return f"{what}: {type(error).__name__}: {error}{place}"


def _place_of_error(error: BaseException) -> str:
    """Innermost place in the user's files, of the deepest cause that has one."""
    chain: list[BaseException] = [error]
    while (deeper := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__)) is not None:
        chain.append(deeper)
    places = (place_in(traceback.extract_tb(link.__traceback__), installed=False) for link in reversed(chain))
    return next(filter(None, places), "")
