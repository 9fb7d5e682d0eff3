"""One reply for the routes that answer in blocks and items: its thinking, its words and its tool calls, as far as they are certain."""

from __future__ import annotations

from dataclasses import dataclass

from whet.data.parsers import ToolSchemas
from whet.data.replies import TAIL
from whet.serve.answers import Sampled
from whet.serve.bounds import context_of
from whet.serve.calls import Call
from whet.serve.service import Service
from whet.serve.text import TextStream
from whet.types import Finish, Request, SamplingParams, ToolCall


@dataclass(frozen=True, slots=True)
class AnswerParts:
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
        self._renderer, self._tools = service.renderer, tools
        self._replies = service.renderer.replies
        self._before = request.tokens[-TAIL:]
        self._opened = self._replies.opens_thinking(self._before)
        self._reads = bool(tools) or self._replies.format.visible is not None or self._replies.puts_apart
        decode = service.decoder(keep_special=self._reads)
        self.sampled = Sampled(request, TextStream(decode, request.sampling.stop))

    @property
    def matched_stop(self) -> str | None:
        """The stop text that ended it, if one did."""
        sampled = self.sampled
        if sampled.finish is not Finish.STOP or sampled.matched_token is not None:
            return None
        text = self._renderer.decode(sampled.tokens)
        return min((stop for stop in sampled.request.sampling.stop if stop in text), key=text.find, default=None)

    def parts(self) -> AnswerParts:
        """All that it says once it has ended; before, the part that no later token can change. Neither thinking nor words ever shrink."""
        text = self.sampled.text.certain
        if not self._reads:
            return AnswerParts(words=text)
        return self._begun(text) if self.sampled.finish is None else self._ended(text)

    def _begun(self, text: str) -> AnswerParts:
        return AnswerParts(*self._replies.visible(text, opened=self._opened))

    def _ended(self, text: str) -> AnswerParts:
        """A reply with a malformed call stays the text that it is, and so does one with calls that nobody reads."""
        sampled = self.sampled
        parsed = self._renderer.parse(sampled.tokens, self._tools, self._before, sampled.request.sampling.stop)
        message, thinking = parsed.message, parsed.message.reasoning_content or ""
        if message.tool_calls and self._tools and not parsed.malformed:
            return AnswerParts(thinking, message.content, message.tool_calls)
        if self._replies.format.visible is not None:
            return AnswerParts(thinking, message.content)
        body = self._replies.split(text, opened=self._opened).body if self._replies.puts_apart else text
        return AnswerParts(thinking, body.strip("\n"))


def one_call(service: Service, call_id: str, tokens: tuple[int, ...], sampling: SamplingParams, *, stream: bool) -> Call:
    """The call of one sample."""
    every = service.config.stream_interval if stream else 0
    return Call(call_id, (Request(f"{call_id}-0", context_of(tokens), sampling, chunk_tokens=every),))
