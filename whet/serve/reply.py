"""One reply for the routes that answer in blocks and items: its thinking, its words and its tool calls, as far as they are certain."""

from __future__ import annotations

from dataclasses import dataclass

from whet.data.chat_template import ToolSchemas
from whet.serve.answers import Sampled
from whet.serve.bounds import context_of
from whet.serve.calls import Call
from whet.serve.openai_chat import CALL_OPENERS
from whet.serve.service import Service
from whet.serve.text import TextStream, held_back
from whet.types import Finish, Request, SamplingParams, ToolCall, text_before

PLAIN_PARSERS = ("hermes", "none")
"""Parsers that put no thinking apart: without tools they change nothing."""
THINK = "<think>"


@dataclass(frozen=True, slots=True)
class ReplyParts:
    """A reply, or its certain beginning."""

    thinking: str = ""
    words: str = ""
    calls: tuple[ToolCall, ...] = ()


class SampledReply:
    """Reads a sample.

    Args:
        service: the service.
        request: the sample's request.
        tools: tools that it may call.
    """

    def __init__(self, service: Service, request: Request, tools: ToolSchemas) -> None:
        self._service, self._tools = service, tools
        self._reads = bool(tools) or service.config.parser not in PLAIN_PARSERS
        self._opener = CALL_OPENERS.get(service.config.parser)
        decode = service.decoder(keep_special=bool(tools))
        self.sampled = Sampled(request, TextStream(decode, request.sampling.stop))

    @property
    def matched_stop(self) -> str | None:
        """The stop text that ended it, if one did."""
        sampled = self.sampled
        if sampled.finish is not Finish.STOP or sampled.matched_token is not None:
            return None
        text = self._service.renderer.decode(sampled.tokens)
        return min((stop for stop in sampled.request.sampling.stop if stop in text), key=text.find, default=None)

    def parts(self) -> ReplyParts:
        """All that it says once it has ended; before, the part that no later token can change. Neither thinking nor words ever shrink."""
        text = self.sampled.text.certain
        if not self._reads:
            return ReplyParts(words=text)
        return self._begun(text) if self.sampled.finish is None else self._ended(text)

    def _begun(self, text: str) -> ReplyParts:
        if not self._opener:
            return ReplyParts()
        before = text_before(text, (self._opener,))
        return ReplyParts(words=before[: len(before) - held_back(before, self._opener)].strip("\n"))

    def _ended(self, text: str) -> ReplyParts:
        """A reply with a malformed call stays the text that it is, and so does one with calls that nobody reads."""
        parsed = self._service.parse(text)
        message = parsed.message
        if parsed.malformed or (message.tool_calls and not self._tools):
            return ReplyParts(words=text.strip("\n"))
        if not message.tool_calls and message.reasoning_content is None:
            return ReplyParts(words=text.strip("\n"))
        return ReplyParts(message.reasoning_content or "", message.content, message.tool_calls)


def one_call(service: Service, call_id: str, tokens: tuple[int, ...], sampling: SamplingParams, *, stream: bool) -> Call:
    """The call of one sample."""
    every = service.config.stream_interval if stream else 0
    return Call(call_id, (Request(f"{call_id}-0", context_of(tokens), sampling, chunk_tokens=every),))


def opens_thinking(service: Service, tokens: tuple[int, ...]) -> bool:
    """True if a prompt ends with the opening of thinking."""
    return service.renderer.decode(tokens[-16:]).rstrip().endswith(THINK)
