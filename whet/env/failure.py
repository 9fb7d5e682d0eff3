"""Exceptions as data, with the part of the traceback that is in a user's code."""

from __future__ import annotations

import traceback
from asyncio import CancelledError
from collections.abc import Iterator

from whet.config.place import is_installed, is_plumbing
from whet.types import Failure


def failure_of(error: BaseException, where: str) -> Failure:
    """An exception as data."""
    return Failure(type(error).__name__, str(error), where, traceback_of(error))


def traceback_of(error: BaseException) -> str:
    """The part of a traceback that is in a user's code, without whet's own frames and the standard
    library's.

    If no frame is a user's there are two cases. Errors with whet's own messages (its exception types,
    and timeouts) get no traceback; for any other error every frame is shown, since a library or whet
    broke.
    """
    links = list(_chain(error))
    parts = [part for link in reversed(links) if (part := _users_part(link))]
    if parts:
        return "\n".join(parts)
    if all(_says_it_all(link) for link in links):
        return ""
    return "".join(traceback.format_exception(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, what it was raised from, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _users_part(link: BaseException) -> str:
    report = traceback.TracebackException.from_exception(link)
    frames = [frame for frame in report.stack if not is_plumbing(frame.filename, frame.name)]
    while frames and is_installed(frames[0].filename):  # a library that whet called, not the user
        del frames[0]
    if not frames:  # what it brings along instead: the traceback in another process, the call that led to it
        return "".join(f"{note.strip()}\n" for note in report.__notes__ or ())
    report.stack = traceback.StackSummary.from_list(frames)
    return "".join(report.format(chain=False))


def _says_it_all(link: BaseException) -> bool:
    return isinstance(link, TimeoutError | CancelledError) or type(link).__module__.split(".")[0] == "whet"
