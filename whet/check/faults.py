"""Texts of faulty rows, and of rows that are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from whet.check.context import CheckContext
from whet.check.findings import Note, fail
from whet.data.files import Row, read_rows
from whet.data.template import Renderer
from whet.model.rotary import check_rotary

SHOWN_ROWS = 2
SHOWN_FAULTS = 5
SHOWN_CHARS = 240
"""Maximum number of characters of one part of a shown row."""


def row_faults(path: str | list[str], parse: Callable[[Row], object]) -> list[str]:
    """Errors of the rows that cannot be parsed, one text each. The last may be the error that ended the
    file's reading.
    """
    faults: list[str] = []
    try:
        for row in read_rows(path):
            try:
                parse(row)
            except ValueError as fault:
                faults.append(str(fault))
    except ValueError as fault:
        faults.append(str(fault))
    return faults


def rotary_faults(context: CheckContext, lengths: Sequence[int]) -> Iterator[Note]:
    """Check that no sequence is so long that the model's rotary scaling would depend on the other sequences."""
    if context.model is not None:
        try:
            check_rotary(lengths, context.model.rotary_limit, type(context.model.hf).__name__)
        except ValueError as error:
            yield fail(str(error))


def fault_notes(faults: Sequence[str]) -> Iterator[Note]:
    """First faults, and the number of the others."""
    for text in faults[:SHOWN_FAULTS]:
        yield fail(text)
    if len(faults) > SHOWN_FAULTS:
        yield fail(f"{len(faults) - SHOWN_FAULTS} further rows are wrong")


def columns_text(path: str | list[str]) -> str:
    """Names of the first row's columns."""
    return ", ".join(next(read_rows(path)).values)


def masked_lines(tokens: Sequence[int], mask: Sequence[bool], renderer: Renderer) -> list[str]:
    """A conversation as lines, each a run of tokens that all train or all do not."""
    lines: list[str] = []
    for trains, run in groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1]):
        text = visible(renderer.decode([token for token, _ in run]))
        lines.append(f"{'TRAINS' if trains else 'context':<8}{text}")
    return lines


def visible(text: str) -> str:
    """The text with visible line ends; a long one without its middle."""
    text = text.replace("\n", "\u21b5")
    if len(text) <= SHOWN_CHARS:
        return text
    half = SHOWN_CHARS // 2
    return f"{text[:half]} [...] {text[-half:]}"
