"""How the checks of data tell faults of rows, and show rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from whet.check.context import Scene
from whet.check.findings import Note, fail
from whet.data.files import Row, read_rows
from whet.data.template import Renderer
from whet.model.rotary import check_rotary

SHOWN_ROWS = 2
SHOWN_FAULTS = 5
SHOWN_CHARS = 240
"""Of one stretch of a rendered row."""


def row_faults(path: str | list[str], parse: Callable[[Row], object]) -> list[str]:
    """What is wrong with the rows that cannot be parsed, one text for each; where a file cannot be read on, that is the last one."""
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


def rotary_faults(scene: Scene, lengths: Sequence[int]) -> Iterator[Note]:
    """A sequence so long that the model's rotary scaling would depend on its company."""
    if scene.model is not None:
        try:
            check_rotary(lengths, scene.model.rotary_limit, type(scene.model.hf).__name__)
        except ValueError as error:
            yield fail(str(error))


def told(faults: Sequence[str]) -> Iterator[Note]:
    """The first faults, and how many more there are."""
    for text in faults[:SHOWN_FAULTS]:
        yield fail(text)
    if len(faults) > SHOWN_FAULTS:
        yield fail(f"{len(faults) - SHOWN_FAULTS} further rows are wrong")


def columns_text(path: str | list[str]) -> str:
    """The columns of the first row."""
    return ", ".join(next(read_rows(path)).values)


def masked_lines(tokens: Sequence[int], mask: Sequence[bool], renderer: Renderer) -> list[str]:
    """A conversation in stretches, each with whether it trains."""
    lines: list[str] = []
    for trains, run in groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1]):
        text = visible(renderer.decode([token for token, _ in run]))
        lines.append(f"{'TRAINS' if trains else 'context':<8}{text}")
    return lines


def visible(text: str) -> str:
    """Line ends as signs, and the middle of a long text left out."""
    text = text.replace("\n", "\u21b5")
    if len(text) <= SHOWN_CHARS:
        return text
    half = SHOWN_CHARS // 2
    return f"{text[:half]} [...] {text[-half:]}"
