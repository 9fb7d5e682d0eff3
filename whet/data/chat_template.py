"""A chat template: messages to the text that a model reads."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from whet.data.encoder import mend
from whet.data.parsers import ToolSchemas
from whet.data.template_process import TEMPLATES
from whet.data.turns import MAX_ROLE, Dicts, left_out, thoughts_written
from whet.types import JSON, Message

THINKING = ("enable_thinking", "thinking")
"""Variables of chat templates that switch the model's thinking on and off."""
_THOUGHT = "836192847103"
"""Thinking that no template writes by itself."""
_READS_THINKING = re.compile(r"""message\.thinking\b|message\[["']thinking["']\]|["']thinking["'] in message\b""")
MAX_FORMS = 4096
"""Forms of conversations whose rendering is remembered."""


class ChatTemplate:
    """Fills in the chat template of a tokenizer, or another one.

    Args:
        tokenizer: a transformers tokenizer.
        text: a template in place of the tokenizer's own.
        options: variables of the template, such as `enable_thinking`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str | None, options: Mapping[str, JSON]) -> None:
        self._tokenizer, self._own, self._options = tokenizer, text, dict(options)
        self._text = tokenizer.chat_template if text is None else text
        self._text_arguments = False
        """True if the last calls were rendered with their arguments as text."""
        self._switched: dict[bool, ChatTemplate] = {}
        self._forms: dict[bytes, str] = {}
        """By the digest of a conversation's form, what the template leaves out: a form is as long as the conversation."""

    @property
    def source(self) -> str:
        """The template's text (of several templates, all of it as JSON); empty: the tokenizer has none."""
        if not self._text:
            return ""
        return self._text if isinstance(self._text, str) else json.dumps(self._text, ensure_ascii=False)

    @cached_property
    def writes_text(self) -> bool:
        """True if the template writes a call's arguments unchanged if they are JSON text; other
        templates quote the text, or need objects."""
        text = '{"a":  "1"}'
        calls = [{"type": "function", "id": "call_0", "function": {"name": "f", "arguments": text}}]
        asked = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": calls}]
        try:
            return text in self._filled(asked, (), False)
        except (ValueError, TypeError, TemplateError):  # it has no calls, or none whose arguments are text
            return False

    @cached_property
    def thinking_variable(self) -> str | None:
        """The variable that switches thinking on and off; None: the template has none."""
        asked: Dicts = [{"role": "user", "content": "u"}]
        for name in THINKING:
            try:
                on, off = (self._with({name: value})(asked, (), True) for value in (True, False))
            except ValueError:  # it takes no such conversation
                return None
            if on != off:
                return name
        return None

    def with_thinking(self, wanted: bool) -> ChatTemplate:
        """The same with thinking switched on or off; unchanged where it has no variable for that."""
        name = self.thinking_variable
        if name is None:
            return self
        if wanted not in self._switched:
            self._switched[wanted] = self._with({name: wanted})
        return self._switched[wanted]

    def _with(self, options: Mapping[str, JSON]) -> ChatTemplate:
        other = copy.copy(self)
        other._options = {**self._options, **options}
        other._forms = {}
        return other

    def without_lost_thinking(self, messages: Sequence[Message], tools: ToolSchemas) -> tuple[Message, ...]:
        """The messages without the thinking that the template does not write: most templates write that of the last turn alone.

        Raises:
            ValueError: the template cannot render messages of this form.
        """
        if not any(message.reasoning_content for message in messages):
            return tuple(messages)
        written = thoughts_written(self, messages, [dict(tool) for tool in tools])
        return tuple(m if i in written else replace(m, reasoning_content=None) for i, m in enumerate(messages))

    @cached_property
    def writes_thinking(self) -> bool:
        """True if the template writes the thinking of an answer's message (`reasoning_content`)."""
        asked = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", "reasoning_content": _THOUGHT}]
        try:
            return _THOUGHT in self._filled(asked, (), False)
        except (ValueError, TypeError, TemplateError):  # it takes no such conversation
            return False

    @cached_property
    def _thinking_key(self) -> str:
        """The key by which the template reads thinking."""
        return "thinking" if _READS_THINKING.search(self.source) and "reasoning_content" not in self.source else "reasoning_content"

    def __call__(self, messages: Dicts, tools: Dicts, generate: bool) -> str:
        """Fill in the template.

        Args:
            messages: as OpenAI has them, with the arguments of calls as objects; a template that does
                not take objects gets their text. They may be text if the template writes text unchanged
                (`writes_text`).
            tools: OpenAI schemas.
            generate: add the opening of an assistant's turn.

        Raises:
            ValueError: there is no chat template, or it cannot render these messages.
        """
        if not self._text:
            raise ValueError(
                "the tokenizer has no chat template, so it cannot render messages: put the model's chat_template.jinja "
                "into its folder, or set data.chat=false for prompts that are plain text"
            )
        fault: Exception | None = None
        calls = any("tool_calls" in message for message in messages)
        for as_text in (self._text_arguments, not self._text_arguments) if calls else (False,):
            try:
                text = self._filled(_with_text_arguments(messages) if as_text else messages, tools, generate)
            except (ValueError, TypeError, TemplateError) as error:
                fault = fault or error
            else:
                self._text_arguments = as_text if calls else self._text_arguments
                return text
        roles = [message["role"] for message in messages]
        raise ValueError(f"the tokenizer's chat template cannot render the roles {roles}: {fault}") from fault

    def _filled(self, messages: Dicts, tools: Dicts, generate: bool) -> str:
        if not messages:
            raise ValueError("the conversation is empty")
        named = {"reasoning_content": self._thinking_key}
        kept = [{named.get(key, key): value for key, value in message.items() if value is not None} for message in messages]
        if type(self._tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
            template = self._tokenizer.get_chat_template(self._own, cast(Any, tools or None))
            options = {**self._tokenizer.special_tokens_map, **self._options}
            text = TEMPLATES.render(template, kept, tools or None, generate=generate, options=options)
        else:  # a tokenizer's own code, which may run anyway (trust_remote_code)
            given: dict[str, Any] = {"chat_template": self._own, **({"tools": tools} if tools else {}), **self._options}
            text = cast(str, self._tokenizer.apply_chat_template(kept, tokenize=False, add_generation_prompt=generate, **given))
        return mend(text, [messages, tools])

    def refuse_left_out(self, messages: Sequence[Message], tools: ToolSchemas, *, first: int = 0) -> None:
        """See that the template writes everything of messages of this form, from the message `first` on; each form is looked at once.

        Raises:
            ValueError: saying what is missing.
        """
        ids: dict[str | None, tuple[int, int]] = {
            call.id: (i, k) for i, message in enumerate(messages) for k, call in enumerate(message.tool_calls)
        }
        calls = [tuple(bool(call.arguments) for call in message.tool_calls) for message in messages]
        shapes = [(m.role, bool(m.content), bool(m.reasoning_content), ids.get(m.tool_call_id)) for m in messages]
        form = hashlib.sha256(repr((shapes, calls, bool(tools), first)).encode("utf-8", "surrogatepass")).digest()
        if len(self._forms) > MAX_FORMS:
            self._forms.clear()
        if form not in self._forms:
            try:
                self._forms[form] = left_out(self, messages, [dict(tool) for tool in tools], first)
            except ValueError:  # it takes these messages, but not such with numbers in them
                text = self([message.to_dict() for message in messages], [dict(tool) for tool in tools], False)
                parts = [(m.content.strip(), (m.reasoning_content or "").strip()) for m in messages]
                missing = next((i for i, pair in enumerate(parts) if i >= first and any(part not in text for part in pair)), None)
                self._forms[form] = "" if missing is None else f"the words of message {missing} ({messages[missing].role[:MAX_ROLE]})"
        if self._forms[form]:
            raise ValueError(
                f"the chat template leaves out {self._forms[form]} of a conversation of {[m.role for m in messages]}; write what is "
                "missing into the words of another message, or give a template that has a place for it (data.template)"
            )


def _with_text_arguments(messages: Dicts) -> Dicts:
    """Messages with the arguments of calls as the JSON text that OpenAI has them in."""
    out: list[Mapping[str, JSON]] = []
    for message in messages:
        if "tool_calls" in message:
            calls = [
                {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls}
        out.append(message)
    return out


def _as_text(arguments: JSON) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
