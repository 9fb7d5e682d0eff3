"""docs/errors.md, made from the cases and from what they printed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

from tests.errors.error_bench import Case
from tests.errors.error_cases import PARTS

WIDTH = 110
"""Characters of a line of prose."""
PAGE = Path(__file__).resolve().parents[2] / "docs/errors.md"
HEAD = """\
# What can go wrong, and what whet says

Every message on this page was printed by the test of its case in `tests/errors`, which makes the mistake at
the command line or in Python and fails if the message, or what is kept, is another. `make docs` writes the
page anew (`WHET_WRITE_DOCS=1 python -m pytest tests/errors`); paths that differ from machine to machine are
shortened to `...`. A mistake in settings, data files, a model's path, the form of a reward or a tool is
answered before torch is loaded.

- A command that cannot go on says `error:` on standard error and ends with **status 2**.
  `WHET_TRACEBACK=1` shows where in whet that came from.
- A trajectory that fails does not end a run: it is a `warning:`, once for each kind of failure, and a number
  in `metrics.jsonl` (`outcome/failed` and `outcome/<its outcome>`). It neither trains nor counts as a reward
  of 0, and what was sampled of it is in the records. Of a traceback, what lies in your own code is shown.
- Whatever is said here, the files of an earlier start are what they were: settings are set aside as
  `config.<n>.toml`, never replaced.
- A whole traceback, with whet's own files in it, is a bug in whet.
"""


def section(case: Case, message: str) -> str:
    """A case as the page shows it."""
    status = "The run goes on." if case.status == 0 else f"The command ends with status {case.status}."
    if message.startswith(">>> "):
        status = "The call raises it."
    cause, remedy = wrapped(f"**Cause.** {case.cause}"), wrapped(f"**What to do.** {case.remedy}")
    return f"### {case.title}\n\n```text\n{message.strip()}\n```\n\n{cause}\n\n{remedy}\n\n{status}\n"


def wrapped(paragraph: str) -> str:
    """A paragraph of Markdown in lines of at most `WIDTH` characters; what stands in backticks stays on one line."""
    whole = re.sub(r"`[^`]+`", lambda code: code[0].replace(" ", "\0"), paragraph)
    return textwrap.fill(whole, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def page(messages: Mapping[str, str]) -> str:
    """The whole page; `messages` by case."""
    parts = [HEAD]
    for name, cases in PARTS.items():
        parts += [f"## {name}\n", *(section(case, messages[case.id]) for case in cases)]
    return "\n".join(parts)


def sections_of(text: str) -> dict[str, str]:
    """The sections of a page, by title."""
    pieces = re.split(r"^(?=###? )", text, flags=re.MULTILINE)
    found = [(piece.partition("\n")[0].removeprefix("### "), piece.rstrip() + "\n") for piece in pieces if piece.startswith("### ")]
    assert len(dict(found)) == len(found), "two sections have the same title"
    return dict(found)
