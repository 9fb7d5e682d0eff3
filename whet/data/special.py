"""Which tokens a text of others must not become, and the marking of messages and tool schemas with them.

Any added token that the tokenizer calls special, and any other that the chat template writes or the parsers of tool calls read as
markup, is kept out of the text of users, tools and schemas. In what the system and the assistant say, markup within a turn (`<think>`,
`<tool_call>`) stays what it is, since it is how a format is described and how a model writes; what opens or ends turns never does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from whet.data.encoder import Encoder, spelled
from whet.data.formats.table import FORMATS
from whet.types import JSON, Message

SPELLED = "special_tokens_in_text"
"""Counts, of a trajectory, the special tokens that its prompt and its environment's answers spell; they are text."""
SPELLED_METRIC = f"data/{SPELLED}"
WORDS = frozenset({"system", "developer", "assistant"})
"""Roles whose words may hold markup within a turn."""
ROLES = WORDS | {"user", "tool", "function", "ipython", "observation", "environment", "model"}
"""Roles that are no attempt at anything."""
SCHEMA_KEYS = frozenset(
    {
        "type",
        "function",
        "name",
        "description",
        "parameters",
        "properties",
        "required",
        "enum",
        "items",
        "default",
        "title",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "const",
        "format",
        "pattern",
        "additionalProperties",
        "nullable",
        "strict",
        "return",
        "returns",
        "response",
        "examples",
        "$ref",
        "$defs",
        "definitions",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "uniqueItems",
        "prefixItems",
    }
)
"""Keys of tool schemas that templates ask for."""


_MARKUP = frozenset(text for chosen in FORMATS.values() for text in chosen.markup)
"""Markup that the parsers of tool calls read."""


class SpecialText:
    """Keeps text of others from becoming special tokens.

    Args:
        encoder: encoder of the tokenizer.
        template: the chat template's text; empty: there is none.
        turns: texts of added tokens that the template writes around turns.
    """

    def __init__(self, encoder: Encoder, template: str, turns: Collection[str]) -> None:
        self._encoder, self._template = encoder, template
        markup = {text for text in encoder.added.values() if text not in encoder.special and _is_markup(text)}
        markup = {text for text in markup if text in turns or text in template or text in _MARKUP}
        protected = markup | encoder.special
        inner = {text for text in protected - set(turns) if text in markup or _twin(text) in protected}
        encoder.protect(protected)
        self._any = spelled(sorted(protected))
        self._turns = spelled(sorted(protected - inner))
        self._cores = {re.sub(r"^\W+|\W+$", "", text) for text in protected}
        self._starts = {text[:n] for text in protected for n in range(1, len(text)) if _is_markup(text[:n])}
        self._ends = {text[n:] for text in protected for n in range(1, len(text)) if _is_markup(text[n:])}
        self._longest = max(map(len, protected), default=0)
        self._letters = frozenset("".join(protected))
        self._inside = "\n".join(sorted(protected))
        self.num_spelled = 0
        """Special tokens that were spelled in what was marked so far."""

    def text(self, text: str, *, inner: bool = False) -> str:
        """A text of others, marked.

        Args:
            inner: leave markup within a turn as it is.
        """
        marked, found = self._encoder.mark(text, self._turns if inner else self._any)
        self.num_spelled += found
        return self._without_parts(marked)

    def message(self, message: Message, *, as_written: bool = False) -> dict[str, JSON]:
        """A message as chat templates read it, marked.

        Args:
            as_written: with the arguments of calls as the JSON text that they came as, where they came as text.

        Raises:
            ValueError: its role spells a special token, or what the template makes one of.
        """
        out = message.to_dict()
        out["role"] = self._role(message.role)
        out["content"] = self.text(message.content, inner=message.role in WORDS)
        if message.reasoning_content is not None:
            out["reasoning_content"] = self.text(message.reasoning_content, inner=message.role in WORDS)
        for key in ("name", "tool_call_id"):
            if key in out:
                out[key] = self._name(out[key])
        if message.tool_calls:
            out["tool_calls"] = [
                {
                    "type": "function",
                    "id": self._name(call.id),
                    "function": {
                        "name": self._name(call.name),
                        "arguments": self.text(call.text) if as_written and call.text is not None else self.value(dict(call.arguments)),
                    },
                }
                for call in message.tool_calls
            ]
        return out

    def value(self, value: JSON) -> Any:
        """JSON of others, its keys included, marked."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self._key(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def _key(self, key: str) -> str:
        return key if key in SCHEMA_KEYS else self._name(key)

    def _name(self, name: str) -> str:
        """A name, of which a template may make `<name>`."""
        marked = self.text(name)
        return self._encoder.mark_at(marked, 0) if marked == name and name in self._cores else marked

    def _role(self, role: str) -> str:
        known = role in ROLES or f"'{role}'" in self._template or f'"{role}"' in self._template
        if known or (self.text(role) == role and role not in self._cores):
            return role
        raise ValueError(f"the role {role!r} spells a special token, or what the chat template may make one of; name the role otherwise")

    def _without_parts(self, text: str) -> str:
        """The text without the letters at its ends that could be part of a special token: text that the
        template writes next to it may be the token's rest."""
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if begin >= end or (text[begin] not in self._letters and text[end - 1] not in self._letters):
            return text
        core = text[begin:end]
        places: set[int] = set()
        for n in range(1, min(self._longest, len(core) + 1)):
            if core[-n:] in self._starts:
                places.add(end - n)
            if core[:n] in self._ends:
                places.add(begin + n - 1)
        if len(core) < self._longest and _is_markup(core) and core in self._inside:
            places.add(begin)
        for place in places:
            text = self._encoder.mark_at(text, place)
        return text


def _is_markup(text: str) -> bool:
    """True if a text has characters other than letters, digits, spaces and their signs."""
    return re.search(r"[^\w\s\u2581\u0120\u010a]", text) is not None


def _twin(text: str) -> str:
    """The closing tag of an opening one and the other way round; empty: it is no tag."""
    match = re.fullmatch(r"(<|\[)(/?)([\w.-]+)(>|\])", text)
    return "" if match is None else f"{match[1]}{'' if match[2] else '/'}{match[3]}{match[4]}"
