"""Error texts and exit statuses of commands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from typing import TypeVar

import typer

T = TypeVar("T")


def guarded(work: Callable[[], T], command: str | None = None) -> T:
    """Run a command. Errors that the user can fix are printed without a traceback (WHET_TRACEBACK=1 shows it)
    and end with status 2; a run that was stopped ends with the status that a shell gives to the signal.

    `command` is the typed command line; None: that of this process.
    """
    from whet.observe.display import printable
    from whet.stop import Stopped
    from whet.types import STOPS

    try:
        return work()
    except STOPS as error:
        if os.environ.get("WHET_TRACEBACK"):
            raise
        print_in_colour(f"error: {printable(words_of(error))}", "red")
        raise SystemExit(2) from error
    except Stopped as stopped:
        print_in_colour(f"{stopped}; go on with:\n  {command or command_line()}", "yellow")
        raise SystemExit(stopped.exit_status) from stopped
    except KeyboardInterrupt as error:
        print_in_colour("stopped", "yellow")
        raise SystemExit(130) from error


def print_in_colour(text: str, colour: str) -> None:
    """Print to standard error, in colour on a terminal."""
    from whet.observe.display import say

    say(typer.style(text, fg=colour) if sys.stderr.isatty() else text, sys.stderr)


def words_of(error: BaseException) -> str:
    """Text of an error; of an operating system's error, the file and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error).rstrip()


def command_line() -> str:
    """The command line as it was typed, but for what would restart a run."""
    return shlex.join(["whet", *(word for word in sys.argv[1:] if word != "checkpoint.resume=fresh")])
