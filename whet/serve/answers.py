"""Common parts of all kinds of answers: the tokens sampled so far, and their text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from whet.serve.calls import Call
from whet.serve.errors import ApiError
from whet.serve.text import DecodeText, TextStream, token_fields
from whet.types import JSON, Chunk, Finish, Request
from whet.types.routes import Routes

Event = Mapping[str, JSON]
"""One event of a stream, or a whole answer."""


class Answer(Protocol):
    """Turns the samples of a call into its client's answer."""

    @property
    def call(self) -> Call: ...

    @property
    def stream(self) -> bool:
        """True if its client wants events instead of one answer."""
        ...

    @property
    def names_events(self) -> bool:
        """True if the events of a stream are sent under names, which are their `type`, and nothing follows the last one."""
        ...

    def take(self, place: int, chunk: Chunk) -> None:
        """Note what the call's request at `place` sampled."""
        ...

    def events(self, place: int) -> list[Event]:
        """Events of a stream for the chunk that was taken last."""
        ...

    def closing(self) -> list[Event]:
        """Events of a stream after the last chunk."""
        ...

    def failed(self, error: ApiError) -> list[Event]:
        """Last events of a stream that an error ends."""
        ...

    def whole(self) -> JSON:
        """The answer of a call that has ended."""
        ...


class PlainEvents:
    """Common part of the streams of OpenAI's older routes, SGLang's and vLLM's."""

    names_events = False

    def failed(self, error: ApiError) -> list[Event]:
        return [error.to_dict()]


@dataclass(slots=True, eq=False)
class Sampled:
    """Tokens that one engine request sampled so far. Its lists have equal lengths."""

    request: Request
    text: TextStream
    keep_stop: bool = False
    """True if a stop token is part of the text."""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    """Log-probs under the distribution that was sampled from."""
    raw_logprobs: list[float] = field(default_factory=list[float])
    """Log-probs under the model's own distribution, if the request asked for them; likewise the next
    one."""
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list[tuple[tuple[int, float], ...]])
    kept: list[list[int]] = field(default_factory=list[list[int]])
    """The ids that each token was drawn from, if the request asked for them and leaves any out."""
    routes: list[Routes] = field(default_factory=list[Routes])
    """Chosen experts, if the request asked for them."""
    versions: list[int] = field(default_factory=list[int])
    num_cached: int = 0
    """Tokens of the prompt that the engine had in its cache."""
    finish: Finish | None = None
    num_new: int = 0
    """Tokens of the last chunk."""

    def take(self, chunk: Chunk) -> None:
        """Note the next chunk."""
        self.tokens.extend(chunk.tokens)
        self.logprobs.extend(chunk.logprobs)
        self.raw_logprobs.extend(chunk.raw_logprobs)
        self.top_logprobs.extend(chunk.top_logprobs)
        self.kept.extend(list(memoryview(ids).cast("i")) for ids in chunk.nucleus)
        self.routes.append(chunk.routes)
        self.versions.extend([chunk.version] * len(chunk.tokens))
        self.finish, self.num_new, self.num_cached = chunk.finish, len(chunk.tokens), chunk.num_cached
        cut = self.matched_token is not None and not self.keep_stop
        self.text.push(chunk.tokens[:-1] if cut else chunk.tokens)
        if chunk.finish is not None:
            self.text.end()

    def shown_logprobs(self, decode: DecodeText, num_last: int) -> list[JSON]:
        """Log-probs of the last `num_last` tokens under the model's own distribution, as OpenAI lists them. The request asked for them."""
        shown: list[JSON] = []
        for i in range(len(self.tokens) - num_last, len(self.tokens)):
            top = [token_fields(decode, *pair) for pair in self.top_logprobs[i]]
            shown.append({**token_fields(decode, self.tokens[i], self.raw_logprobs[i]), "top_logprobs": top})
        return shown

    @property
    def matched_token(self) -> int | None:
        """The stop token that ended it, if one did."""
        if self.finish is Finish.STOP and self.tokens[-1] in self.request.sampling.stop_token_ids:
            return self.tokens[-1]
        return None


def usage_of(choices: Sequence[Sampled], num_each: int) -> dict[str, JSON]:
    """Token counts as OpenAI gives them: a prompt counts once, however many choices it has, and so does what was cached of it.

    Args:
        choices: choices of one prompt after the other.
        num_each: choices of a prompt.
    """
    firsts = choices[::num_each]
    num_prompt, num_sampled = sum(len(each.request.tokens) for each in firsts), sum(len(each.tokens) for each in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": sum(each.num_cached for each in firsts)},
    }
