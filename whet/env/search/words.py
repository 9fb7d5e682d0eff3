"""Words of a text for the index: letters and digits in lower case without accents, and pairs of characters where words have no spaces."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import groupby

UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x31F0, 0x31FF),  # Katakana's extensions
    (0x3400, 0x4DBF),  # Han, extension A
    (0x4E00, 0x9FFF),  # Han
    (0xAC00, 0xD7A3),  # Hangul: its spaces separate phrases, whose ends vary
    (0xF900, 0xFAFF),  # Han, compatibility
    (0x20000, 0x3FFFF),  # Han, later extensions
)
"""Ranges of characters that are indexed by ones and pairs."""
ACCENTS = range(0x0300, 0x0370)
MAX_WORD_CHARS = 64
"""A longer word counts by its beginning: no vocabulary of long data."""


class _Letters(dict[int, str | None]):
    """A table for `str.translate`: accents fall away, what is no letter, digit or mark becomes a space."""

    def __missing__(self, code: int) -> str | None:
        kept = chr(code) if unicodedata.category(chr(code))[0] in "LNM" else " "
        self[code] = None if code in ACCENTS else kept
        return self[code]


_LETTERS = _Letters()


def words_of(text: str, *, query: bool = False) -> list[str]:
    """The words of a text, in its order.

    Args:
        text: in any language.
        query: pairs of characters alone where there are any; a document has the single characters, too.
    """
    plain = unicodedata.normalize("NFC", unicodedata.normalize("NFKD", text.casefold()).translate(_LETTERS))
    words: list[str] = []
    for chunk in plain.split():
        if chunk.isascii():
            words.append(chunk[:MAX_WORD_CHARS])
        else:
            words += _parts(chunk, query)
    return words


def _parts(chunk: str, query: bool) -> Iterator[str]:
    for unspaced, characters in groupby(chunk, _is_unspaced):
        run = "".join(characters)
        if not unspaced:
            yield run[:MAX_WORD_CHARS]
            continue
        if not query or len(run) == 1:
            yield from run
        yield from (run[i : i + 2] for i in range(len(run) - 1))


def _is_unspaced(character: str) -> bool:
    code = ord(character)
    return any(first <= code <= last for first, last in UNSPACED)
