"""The result of parsing a turn's text: a message with its tool calls, and the faults of those that are malformed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from whet.types import JSON, Message

ToolSchemas = Sequence[Mapping[str, JSON]]
"""OpenAI schemas of tools."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A piece of text that tried to be a tool call and is none."""

    text: str
    """Description of the fault, for the model to read."""
    place: int
    """Its place among the reply's calls, readable and malformed ones together, from 0."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A reply as a message, and what in it tried to be a tool call and is none, in order."""

    message: Message
    malformed: tuple[Malformed, ...] = ()


Parser = Callable[[str, ToolSchemas], Parsed]
"""Parses the text of a turn, without its stop token, for the tools that the turn could call. It must not raise, for any text."""
