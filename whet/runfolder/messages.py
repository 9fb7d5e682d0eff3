"""What may be passed on of a message that may quote what somebody or some model wrote."""

from __future__ import annotations

import re

MAX_WORD_CHARS = 40
LEFT_OUT = "<message left out>"

_QUOTE = re.compile(r"""(?<!\w)(["'])((?:\\.|(?!\1(?!\w)).)*)(\1|\Z)""", re.DOTALL)


def without_quotes(text: str) -> str:
    """A message whose quoted strings are names, not text: one with white space or other than ASCII characters inside, or of over
    40 characters, becomes `<N characters>`. A quote that does not end takes the rest."""
    return _QUOTE.sub(lambda match: f"<{len(match[2])} characters>" if _is_text(match[2]) else match[0], text)


def own_message(text: str) -> str:
    """The message of an error of whet's own: its first line without quotes. Further lines may be what a trajectory failed with."""
    first, *more = text.split("\n")
    return without_quotes(first) + (f" <{len(more)} lines left out>" if more else "")


def _is_text(quoted: str) -> bool:
    return len(quoted) > MAX_WORD_CHARS or not quoted.isascii() or re.search(r"\s|\\[ntr]", quoted) is not None
