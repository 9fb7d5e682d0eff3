"""What ends a command with words instead of a traceback."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run, or an engine that serves, cannot go on; the text says why, and what to do."""


STOPS = (ValueError, OSError, RunFailed)
"""What is told in words: what the user can mend, what the operating system refused, and how a run failed."""
