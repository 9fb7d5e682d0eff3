"""Errors that end a command with a message instead of a traceback."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run, or an engine that serves, cannot go on; the text says why, and what to do."""


STOPS = (ValueError, OSError, RunFailed)
"""Exceptions printed as a message without a traceback: mistakes the user can correct, refusals of the
operating system, and the failure of a run."""
