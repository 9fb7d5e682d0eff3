"""Places of errors in a user's code: frames of whet, of Python and of generated code are left out."""

from __future__ import annotations

import re
import sysconfig
import traceback
from pathlib import Path

_WHET = Path(__file__).resolve().parents[1]
_STANDARD = Path(sysconfig.get_path("stdlib"))
_TYPED = re.compile(r"<(stdin|string|i?python-input-.*)>")
_INSTALLED = {"site-packages", "dist-packages"}


def is_installed(filename: str) -> bool:
    """True for a file of an installed package."""
    return not _INSTALLED.isdisjoint(Path(filename).parts)


def is_plumbing(filename: str, name: str = "") -> bool:
    """True for a frame of whet or of Python, and of code that has no file, unless it was typed: at Python's prompt, or after `python -c`.

    Args:
        filename: the frame's file.
        name: its function; what dataclasses generate has dunder names.
    """
    if filename.startswith("<"):
        return not _TYPED.fullmatch(filename) or (name.startswith("__") and name.endswith("__"))
    path = Path(filename)
    return _WHET in path.parents or (_STANDARD in path.parents and not is_installed(filename))


def users_frame(stack: traceback.StackSummary, *, installed: bool = True) -> traceback.FrameSummary | None:
    """The innermost frame in a user's files; None if there is none. `installed` counts files of installed packages, too."""
    frames = (frame for frame in reversed(stack) if not is_plumbing(frame.filename, frame.name))
    return next((frame for frame in frames if installed or not is_installed(frame.filename)), None)


def place_in(stack: traceback.StackSummary, *, installed: bool = True) -> str:
    """The innermost place in a user's files, as ` (at file:line in function)`; "" if there is none. Arguments as for `users_frame`."""
    frame = users_frame(stack, installed=installed)
    return "" if frame is None else f" (at {frame.filename}:{frame.lineno} in {frame.name})"


def place_of(error: BaseException) -> str:
    """The innermost place of an error in a user's files, as `place_in`."""
    return place_in(traceback.extract_tb(error.__traceback__))
