"""The one place where a check runs what may be the user's own code: if it raises or does not return, that is a fault with a place."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

import whet

T = TypeVar("T")
PACKAGE = str(Path(whet.__file__).parent)
STANDARD_LIBRARY = str(Path(asyncio.__file__).parents[1])


class UserFault(ValueError):
    """Code that a configuration names raised or did not return; the text says where."""


def run_user_code(what: str, work: Callable[[], T], deadline_s: float) -> T:
    """The result of `work`, which runs on a daemon thread of its own: one that hangs costs the deadline, not the process.

    Raises:
        UserFault: it raised or was not done in time. What whet itself found wrong is told in its own words, anything else with
            its type and the innermost place in the user's files.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []

    def body() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:  # a user's code may raise anything, SystemExit too; it is told below
            outcome.append((None, error))

    thread = threading.Thread(target=body, name="whet-check", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not outcome:
        assert thread.ident is not None
        where = _place_of_frame(sys._current_frames().get(thread.ident))
        raise UserFault(f"{what} took longer than {deadline_s:g} s{where}")
    result, error = outcome[0]
    if error is not None:
        raise UserFault(_tell(what, error)) from error
    return result  # pyright: ignore[reportReturnType]


def run_user_coroutine(what: str, work: Callable[[], Awaitable[T]], deadline_s: float) -> T:
    """As `run_user_code`, for what is awaited: it is cancelled at its deadline, and left alone if it does not even wait.

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

    return run_user_code(what, lambda: asyncio.run(timed()), deadline_s + 5.0)


def _tell(what: str, error: BaseException) -> str:
    place = _place_of_error(error)
    if type(error).__module__.startswith("whet.") or (isinstance(error, ValueError) and not place):
        return str(error)  # whet's own words, which name the place where there is one
    return f"{what}: {type(error).__name__}: {error}{place}"


def _place_of_error(error: BaseException) -> str:
    """The innermost place in a user's files, by the deepest cause that has one."""
    chain: list[BaseException] = [error]
    while (deeper := chain[-1].__cause__ or (None if chain[-1].__suppress_context__ else chain[-1].__context__)) is not None:
        chain.append(deeper)
    for link in reversed(chain):
        for frame in reversed(traceback.extract_tb(link.__traceback__)):
            if _is_users(frame.filename):
                return f" (at {frame.filename}:{frame.lineno} in {frame.name})"
    return ""


def _place_of_frame(frame: FrameType | None) -> str:
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f" (at {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name})"
        frame = frame.f_back
    return ""


def _is_users(filename: str) -> bool:
    return not filename.startswith((PACKAGE, STANDARD_LIBRARY, "<frozen")) and "site-packages" not in filename
