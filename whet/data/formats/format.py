"""The form of a model family's tool calls: how they are read, answered, streamed and asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from whet.data.parsers import Parser, ToolSchemas
from whet.types import Message


@dataclass(frozen=True, slots=True)
class Forced:
    """The writing of calls as a grammar has it: literal text around a tool's arguments as JSON."""

    before: str
    """Text before the first call."""
    open: Callable[[str], str]
    """Text before the arguments of a tool of this name."""
    close: str
    """Text after the arguments."""
    between: str | None
    """Text between two calls; None: the format has one call at most."""
    after: str = ""
    """Text after the last call."""
    bare: bool = False
    """True if the tool's name is written as it is; false: as JSON."""


@dataclass(frozen=True, slots=True)
class Format:
    """Form of the tool calls of a family of models."""

    name: str
    """Its name in `env.parser`."""
    parse: Parser
    openers: tuple[str, ...] | None = ()
    """Texts from which on a reply may be a call: a stream holds the reply back from there. None: it may be one from its first letter on."""
    markup: tuple[str, ...] = ()
    """Texts that the format reads as markup. Where a tokenizer has a token for one, text of others is kept from becoming that token."""
    exact: bool = False
    """True if only the tokens of the markup count as markup, where the tokenizer has them: the same letters in other tokens are text."""
    thinks: bool = True
    """True if a reply may begin with `<think>`, which is then no part of what is parsed."""
    stops: tuple[str, ...] = ()
    """Added tokens with which models of the family end a turn, in place of what the chat template writes there."""
    closing: str = ""
    """Text that the chat template writes where a turn was ended by one of `stops`."""
    listed: bool = True
    """True if prompts list the tools as the chat template does; false: the user's own words describe the format."""
    wrap: Callable[[Message], str] | None = None
    """Text of a tool's answer inside the assistant's turn; None: answers are messages of the chat template."""
    stop_texts: Callable[[ToolSchemas], tuple[str, ...]] | None = None
    """Texts that end a turn, for these tools; None: none does."""
    visible: Callable[[str], tuple[str, str]] | None = None
    """The thinking and the words in the beginning of a reply, as far as no later text changes them, for formats that write them otherwise
    than as `<think>...</think>` and plain text."""
    keeps_ids: bool = False
    """True if models write the ids of their calls."""
    forced: Forced | None = None
    """None: a call cannot be asked for by a grammar."""
    why_not_forced: str = "its calls have no fixed form around JSON"
    """Reason for that."""
