"""Checks of preference pairs: every row is rendered as the run does it, and the first are shown as the model
sees them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from whet.check.context import CheckContext
from whet.check.faults import SHOWN_ROWS, columns_text, fault_notes, masked_lines, rotary_faults, row_faults
from whet.check.findings import Note, fail, need, ok
from whet.data.config import PreferenceConfig
from whet.data.files import paths_text
from whet.data.preference import PreferenceSource, preference_from, preference_source, read_preferences
from whet.settings.supervised import PairRunConfig, held_out_rows


def check_pairs(context: CheckContext, config: PairRunConfig) -> Iterator[Note]:
    """Check the training pairs, and those held out."""
    source = yield from _pairs(context, config.data, config.seed)
    if source is not None:
        context.source = source
        context.longest = max(((len(a.tokens), len(b.tokens)) for a, b in source.rows()), key=sum)
    held = held_out_rows(config.data, config.evaluate)
    if held is not None:
        for note in _pairs(context, held, config.seed):
            yield Note(note.status, f"held out: {note.text}", note.lines)


def _pairs(context: CheckContext, rows: PreferenceConfig, seed: int) -> Iterator[Note]:
    """Check one set of pairs. Returns its source, if it can be made."""
    try:
        preferences = read_preferences(rows.path, rows)
    except ValueError as error:
        yield from fault_notes(row_faults(rows.path, lambda row: preference_from(row, rows)) or [str(error)])
        return None
    yield ok(f"{len(preferences)} rows of {paths_text(rows.path)}, columns {columns_text(rows.path)}")
    renderer = need(context.renderer, "the tokenizer")
    try:
        source = preference_source(rows, renderer, run_seed=seed)
    except ValueError as error:
        yield fail(str(error))
        return None
    yield from _lengths(context, source, rows)
    for number, sides in enumerate(islice(source.rows(), SHOWN_ROWS), start=1):
        for side, row in zip(("chosen", "rejected"), sides, strict=True):
            mask = tuple(map(bool, row.mask))
            yield ok(f"pair {number}, {side}: {len(row.tokens)} tokens, {sum(mask)} train", masked_lines(row.tokens, mask, renderer))
    return source


def _lengths(context: CheckContext, source: PreferenceSource, rows: PreferenceConfig) -> Iterator[Note]:
    sides = [row for pair in source.rows() for row in pair]
    lengths = [len(row.tokens) for row in sides]
    highest = max(max(row.tokens) for row in sides)
    dropped = "" if rows.max_tokens is None else f", {source.num_dropped} dropped as longer than data.max_tokens = {rows.max_tokens}"
    same = f", {source.num_same} left out whose replies are the same" if source.num_same else ""
    yield ok(f"{len(source)} pairs of conversations of {min(lengths)} to {max(lengths)} tokens{dropped}{same}")
    yield from rotary_faults(context, lengths)
    if context.vocab_size is not None and highest >= context.vocab_size:
        yield fail(f"token ids go up to {highest}, but the model knows 0 to {context.vocab_size - 1}: its tokenizer is another")
