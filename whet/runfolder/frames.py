"""Origin of an error without its message: an exception's message may quote a prompt or a reply, its
frames do not."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from collections.abc import Iterator
from itertools import pairwise

_HEADER = re.compile(r'([ |+]*)File "(.+\.py)", line (\d+), in ([\w.<>]+)')
_KIND = re.compile(r"([A-Za-z_][\w.]*)(: .*)?:?")
_BETWEEN = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_OWN = sys.stdlib_module_names | {
    *("whet", "torch", "transformers", "tokenizers", "huggingface_hub", "safetensors"),
    *("jinja2", "numpy", "pyarrow", "pydantic", "pydantic_core", "filelock", "rich", "typer"),
}
"""whet, and what its own code calls."""


def frames_of(text: str) -> list[str]:
    """The frames and the types of a formatted traceback, in its order, without the messages.

    A message may look like a traceback, and a program that a model wrote may have left one in it. So a frame counts only if the
    file that it names has that very line; the rest is dropped.
    """
    out: list[str] = []
    inside: str | None = None  # the indentation of the type that ends the frames being read
    for line, below in pairwise([*text.split("\n"), ""]):
        header = _HEADER.fullmatch(line)
        if header is not None:
            indent, file, number, name = header.groups()
            source = linecache.getline(file, int(number)).strip()
            if source and source == below.strip(" |"):
                inside = indent[:-2]
                out += [f'  File "{file}", line {number}, in {name}', f"    {source}"]
        elif line in _BETWEEN:
            out.append(line)
        elif inside is not None and line.startswith(inside) and (kind := _KIND.fullmatch(line[len(inside) :])):
            out.append(kind[1])
            inside = None
    return _trimmed(out)


def _trimmed(lines: list[str]) -> list[str]:
    """Without the words that stood between exceptions of which nothing is left."""
    kept: list[str] = []
    for line in lines:
        if line not in _BETWEEN or (kept and kept[-1] not in _BETWEEN):
            kept.append(line)
    return kept[:-1] if kept and kept[-1] in _BETWEEN else kept


def in_user_code(error: BaseException) -> bool:
    """True if code other than whet's (and its dependencies') took part in raising an exception or one
    of its causes, so that the message may quote a user's data."""
    return any(
        str(frame.f_globals.get("__name__")).partition(".")[0] not in _OWN
        for part in _chain(error)
        for frame, _ in traceback.walk_tb(part.__traceback__)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception with its causes and contexts, each once."""
    left, seen = [error], set[int]()
    while left:
        part = left.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            left += [cause for cause in (part.__cause__, part.__context__) if cause is not None]
            if isinstance(part, BaseExceptionGroup):
                left += part.exceptions
