"""Supervised rows: conversations as token ids, in which what an assistant says trains and everything else is
context."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from whet.data.config import MaskName, SupervisedConfig
from whet.data.cursor import Cursor, EpochSource
from whet.data.files import Row, describe_value
from whet.data.messages import messages_from, tools_from
from whet.data.rows import fail_missing, read_all, renamed_columns
from whet.types import JSON, Message, Sample
from whet.types.columns import Ints, Runs
from whet.types.records import unsampled

if TYPE_CHECKING:
    from whet.data.template import Renderer


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of a conversation, and the tools that the assistant may call."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, JSON], ...] = ()
    """OpenAI schemas."""
    origin: str = ""
    """`file:line`, for error messages."""
    first_trained: int = 0
    """First message that can train. Assistant messages before it are context: a prompt's earlier turns."""
    silent: frozenset[int] = frozenset()
    """Messages of the assistant that are context, too."""


_RUN = re.compile(rb"\x00+|\x01+")


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A conversation's ids and which of them train, in five bytes a token: all of a data set is held in memory."""

    index: int
    """Index among all rows, dropped ones included."""
    tokens: array[int]
    mask: bytes

    def sample(self, group: str, trajectory: str) -> Sample:
        """As a sample, none of whose tokens a policy sampled: all have the origin `PROMPT`, and the loss mask says which train."""
        mask = Runs.from_runs((run[0][0] != 0, len(run[0])) for run in _RUN.finditer(self.mask))
        return unsampled(Ints.of(self.tokens), mask, group, trajectory)

    def identity(self) -> bytes:
        """Bytes that identify the row in the digest of a data set."""
        return f"{self.index} {len(self.tokens)} ".encode() + self.tokens.tobytes() + self.mask


class SupervisedSource(EpochSource):
    """An endless stream of supervised samples with a cursor, as `TaskSource` is one of tasks.

    A sample's group and trajectory are its id, `name/index#epoch`. None of its tokens was sampled: all have the origin
    `PROMPT`, and the loss mask says which train: an assistant's, the stop token included.

    Args:
        conversations: tokenised here, as rollouts in which the model says the same would be.
        renderer: messages to ids.
        mask: which tokens train, see `whet.data.masks`.
        max_tokens: longer conversations are dropped, and counted in `num_dropped`.
        shuffle: a new order in every epoch.
        seed: seed of the shuffles.
        name: the source's.

    Raises:
        ValueError: there are no conversations, all are too long, or one cannot be rendered (with its `file:line`).
    """

    def __init__(
        self,
        conversations: Iterable[Conversation],
        renderer: Renderer,
        *,
        mask: MaskName = "delta",
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 42,
        name: str = "train",
    ) -> None:
        self.name = name
        rows = [tokenise(index, conversation, renderer, mask) for index, conversation in enumerate(conversations)]
        if not rows:
            raise ValueError(f"source {name!r} has no conversations to learn from")
        self._rows = [row for row in rows if max_tokens is None or len(row.tokens) <= max_tokens]
        if not self._rows:
            lengths = [len(row.tokens) for row in rows]
            spread = f"they have {min(lengths)} to {max(lengths)} tokens"
            raise ValueError(f"every conversation of source {name!r} is longer than max_tokens = {max_tokens}: {spread}; raise it")
        self.num_dropped = len(rows) - len(self._rows)
        self._cursor = Cursor(name, [hashlib.sha256(row.identity()).digest() for row in self._rows], shuffle=shuffle, seed=seed)

    def __len__(self) -> int:
        """Samples in one epoch."""
        return len(self._rows)

    def rows(self) -> Iterator[tuple[Sequence[int], Sequence[bool]]]:
        """Each conversation's ids, and which of them train, in the order of the files."""
        return ((row.tokens, tuple(map(bool, row.mask))) for row in self._rows)

    def next(self, n: int) -> list[Sample]:
        """The next `n` samples."""
        return [self._sample(index, epoch) for index, epoch in self._cursor.take(n)]

    def _sample(self, index: int, epoch: int) -> Sample:
        row = self._rows[index]
        sample_id = f"{self.name}/{row.index}#{epoch}"
        return row.sample(sample_id, sample_id)


def supervised_source(
    config: SupervisedConfig, renderer: Renderer, *, run_seed: int, name: str = "train"
) -> SupervisedSource:
    """The source that a configuration asks for; `run_seed` orders it where the configuration has no seed.

    Raises:
        ValueError: the data cannot be read or rendered (`file:line`), are empty, or every conversation is too long.
    """
    return SupervisedSource(
        read_conversations(config),
        renderer,
        mask=config.mask,
        max_tokens=config.max_tokens,
        shuffle=config.shuffle,
        seed=run_seed if config.seed is None else config.seed,
        name=name,
    )


def read_conversations(config: SupervisedConfig) -> list[Conversation]:
    """The conversations of data files, in their order.

    Raises:
        ValueError: a file cannot be read, a column is missing or holds what it should not (`file:line`), or there are
            no rows.
    """
    return read_all(config.path, renamed_columns(config, "tools_key"), lambda row: conversation_from(row, config))


def conversation_from(row: Row, config: SupervisedConfig) -> Conversation:
    """The conversation that a row holds.

    Raises:
        ValueError: a column is missing or holds what it should not; the text starts with `file:line`.
    """
    if config.messages_key is not None:
        value, where = required(row, "messages_key", config.messages_key)
        value, silent = split_step_masks(value, where)
        messages, first_trained = messages_from(value, where), 0
    else:
        assert config.prompt_key is not None and config.response_key is not None
        prompt = _prompt(row, config.prompt_key)
        messages, first_trained, silent = (*prompt, _response(row, config.response_key)), len(prompt), frozenset[int]()
    tools = None if config.tools_key is None else row.values.get(config.tools_key)
    schemas = tools_from(tools, f"{row.origin}: column {config.tools_key!r}")
    return Conversation(messages, schemas, row.origin, first_trained, silent)


def split_step_masks(value: JSON, where: str) -> tuple[JSON, frozenset[int]]:
    """The messages without their `step_loss_mask`, and which of them have it 0."""
    if not isinstance(value, list):
        return value, frozenset()
    silent: set[int] = set()
    messages: list[JSON] = []
    for index, message in enumerate(value):
        if isinstance(message, dict) and "step_loss_mask" in message:
            step = message["step_loss_mask"]
            if step not in (0, 1, None):
                raise ValueError(f"{where}, message {index}: step_loss_mask is {describe_value(step)}, expected 0 or 1")
            silent.update([index] if step == 0 else [])
            message = {key: item for key, item in message.items() if key != "step_loss_mask"}
        messages.append(message)
    return messages, frozenset(silent)


def _prompt(row: Row, key: str) -> tuple[Message, ...]:
    value, where = required(row, "prompt_key", key)
    return (Message("user", value),) if isinstance(value, str) else messages_from(value, where)


def _response(row: Row, key: str) -> Message:
    value, where = required(row, "response_key", key)
    if not isinstance(value, str):
        raise ValueError(f"{where} holds {describe_value(value)}, expected text")
    return Message("assistant", value)


def required(row: Row, setting: str, name: str) -> tuple[JSON, str]:
    """Content of a row's column, and its place, for errors.

    Raises:
        ValueError: the row has no such column.
    """
    if name not in row.values:
        fail_missing(row.origin, setting, name, row.values)
    return row.values[name], f"{row.origin}: column {name!r}"


def tokenise(index: int, conversation: Conversation, renderer: Renderer, name: MaskName) -> TokenRow:
    """A conversation as ids.

    Raises:
        ValueError: it cannot be rendered, or nothing in it trains; the text starts with its `file:line`.
    """
    from whet.data.masks import mask_conversation  # transformers with it, which rows that are only read do not need

    try:
        tokens, mask = mask_conversation(
            name, renderer, conversation.messages, conversation.tools, conversation.first_trained, conversation.silent
        )
        if not any(mask):
            raise ValueError("no token of the conversation trains: step_loss_mask is 0 for all that an assistant says; leave the row out")
    except ValueError as error:
        raise ValueError(f"{conversation.origin or f'conversation {index}'}: {error}") from error
    return TokenRow(index, array("i", tokens), bytes(mask))
