"""Preference rows: two replies to one prompt, the first preferred to the second."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whet.data.config import MaskName, PairColumns, PreferenceConfig
from whet.data.cursor import Cursor, EpochSource
from whet.data.files import Row, describe_value
from whet.data.messages import messages_from, tools_from
from whet.data.rows import read_all, renamed_columns
from whet.data.supervised import Conversation, TokenRow, required, tokenise
from whet.types import Message, Pair

if TYPE_CHECKING:
    from whet.data.template import Renderer


@dataclass(frozen=True, slots=True)
class Preference:
    """Two conversations that part after their prompt."""

    chosen: Conversation
    rejected: Conversation
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class _Row:
    chosen: TokenRow
    rejected: TokenRow
    margin: float

    @property
    def longest(self) -> int:
        return max(len(self.chosen.tokens), len(self.rejected.tokens))

    def digest(self) -> bytes:
        """The sha256 of what trains."""
        return hashlib.sha256(self.chosen.identity() + self.rejected.identity() + f"{self.margin!r} ".encode()).digest()


class PreferenceSource(EpochSource):
    """An endless stream of pairs with a cursor, as `SupervisedSource` is one of samples.

    A pair's samples have the group `name/index#epoch` and the trajectories `.../chosen` and `.../rejected`.

    Args:
        preferences: tokenised here, each conversation as a supervised row.
        renderer: messages to ids.
        columns: which tokens train, and how long a conversation may be.
        shuffle: a new order in every epoch.
        seed: seed of the shuffles.
        name: the source's.

    Raises:
        ValueError: there are no pairs, all are too long or alike, or one cannot be rendered (with its `file:line`).
    """

    def __init__(
        self,
        preferences: Iterable[Preference],
        renderer: Renderer,
        *,
        columns: PairColumns | None = None,
        shuffle: bool = True,
        seed: int = 42,
        name: str = "train",
    ) -> None:
        columns = columns or PairColumns()
        self.name = name
        rows = [_tokenise(index, preference, renderer, columns.mask) for index, preference in enumerate(preferences)]
        if not rows:
            raise ValueError(f"source {name!r} has no pairs to learn from")
        different = [row for row in rows if row.chosen.tokens != row.rejected.tokens]
        self.num_same = len(rows) - len(different)
        """Pairs left out since both replies have the same tokens: there is nothing to prefer."""
        if not different:
            raise ValueError(f"in every pair of source {name!r} both replies are the same; are chosen_key and rejected_key two columns?")
        limit = columns.max_tokens
        self._rows = [row for row in different if limit is None or row.longest <= limit]
        if not self._rows:
            spread = f"they have {min(row.longest for row in different)} to {max(row.longest for row in different)} tokens"
            raise ValueError(f"every pair of source {name!r} has a conversation longer than max_tokens = {limit}: {spread}; raise it")
        self.num_dropped = len(different) - len(self._rows)
        self._cursor = Cursor(name, [row.digest() for row in self._rows], shuffle=shuffle, seed=seed)

    def __len__(self) -> int:
        """Pairs in one epoch."""
        return len(self._rows)

    def rows(self) -> Iterator[tuple[TokenRow, TokenRow]]:
        """Each pair's ids and which of them train, chosen and rejected, in the order of the files."""
        return ((row.chosen, row.rejected) for row in self._rows)

    def next(self, n: int) -> list[Pair]:
        """The next `n` pairs."""
        return [self._pair(self._rows[index], epoch) for index, epoch in self._cursor.take(n)]

    def all(self) -> list[Pair]:
        """Every pair once, in the order of the files; the cursor stays where it is."""
        return [self._pair(row, 0) for row in self._rows]

    def _pair(self, row: _Row, epoch: int) -> Pair:
        group = f"{self.name}/{row.chosen.index}#{epoch}"
        return Pair(row.chosen.sample(group, f"{group}/chosen"), row.rejected.sample(group, f"{group}/rejected"), row.margin)


def preference_source(config: PreferenceConfig, renderer: Renderer, *, run_seed: int, name: str = "train") -> PreferenceSource:
    """The source that a configuration asks for; `run_seed` orders it where the configuration has no seed.

    Raises:
        ValueError: the data cannot be read or rendered (`file:line`), are empty, all alike, or every pair is too long.
    """
    seed = run_seed if config.seed is None else config.seed
    rows = read_preferences(config.path, config)
    return PreferenceSource(rows, renderer, columns=config, shuffle=config.shuffle, seed=seed, name=name)


def read_preferences(path: str | list[str], columns: PairColumns) -> list[Preference]:
    """The pairs of data files, in their order.

    Raises:
        ValueError: a file cannot be read, a column is missing or holds what it should not (`file:line`), or there are no rows.
    """
    return read_all(path, renamed_columns(columns, "tools_key"), lambda row: preference_from(row, columns))


def preference_from(row: Row, columns: PairColumns) -> Preference:
    """The pair that a row holds.

    Raises:
        ValueError: a column is missing or holds what it should not; the text starts with `file:line`.
    """
    prompt = _prompt(row, columns.prompt_key)
    chosen, rejected = (
        (*prompt, *_reply(row, setting, key, bare=columns.prompt_key is not None))
        for setting, key in (("chosen_key", columns.chosen_key), ("rejected_key", columns.rejected_key))
    )
    shared = len(prompt) if columns.prompt_key is not None else _num_alike(chosen, rejected)
    if chosen == rejected:  # a tie, which the source counts: its whole last turn would be the reply
        shared = min(shared, max(len(chosen) - 1, 0))
    for key, messages in ((columns.chosen_key, chosen), (columns.rejected_key, rejected)):
        if shared == 0:
            raise ValueError(
                f"{row.origin}: {columns.chosen_key!r} and {columns.rejected_key!r} begin with different messages, so they share no "
                "prompt; set data.prompt_key if the prompt has a column of its own"
            )
        if shared == len(messages) or messages[shared].role != "assistant":
            what = "nothing" if shared == len(messages) else f"a message of the role {messages[shared].role!r}"
            after = f"after the shared prompt of {shared} messages"
            raise ValueError(f"{row.origin}: column {key!r} has {what} {after}, expected an assistant's reply")
    tools = None if columns.tools_key is None else row.values.get(columns.tools_key)
    schemas = tools_from(tools, f"{row.origin}: column {columns.tools_key!r}")
    first, second = (Conversation(messages, schemas, row.origin, shared) for messages in (chosen, rejected))
    return Preference(first, second, _margin(row, columns.margin_key))


def _prompt(row: Row, key: str | None) -> tuple[Message, ...]:
    if key is None:
        return ()
    value, where = required(row, "prompt_key", key)
    return (Message("user", value),) if isinstance(value, str) else messages_from(value, where)


def _reply(row: Row, setting: str, key: str, *, bare: bool) -> tuple[Message, ...]:
    value, where = required(row, setting, key)
    if isinstance(value, str):
        if not bare:
            key = " to 'prompt'" if "prompt" in row.values else ""
            raise ValueError(f"{where} holds text, but there is no prompt to it: set data.prompt_key{key}, or give whole conversations")
        return (Message("assistant", value),)
    return messages_from(value, where)


def _margin(row: Row, key: str | None) -> float:
    if key is None:
        return 0.0
    value, where = required(row, "margin_key", key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{where} holds {describe_value(value)}, expected a number of at least 0")
    return float(value)


def _num_alike(first: Sequence[Message], second: Sequence[Message]) -> int:
    """Number of messages that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


def _tokenise(index: int, preference: Preference, renderer: Renderer, mask: MaskName) -> _Row:
    chosen, rejected = (tokenise(index, one, renderer, mask) for one in (preference.chosen, preference.rejected))
    return _Row(chosen, rejected, preference.margin)
