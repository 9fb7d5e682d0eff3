"""Requests to engines and their answers: chunks of tokens, scores, receipts of weights. Standard
library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from whet.types.columns import Columns, Doubles, Floats, Ints, Ragged, to_columns
from whet.types.records import Finish
from whet.types.routes import Routes

MAX_TEMPERATURE = 1e6
"""A temperature that float32 takes for infinite would make no numbers of what a grammar leaves out."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on a reply: JSON of a schema, a text that a regular expression matches as a whole,
    or a text of a grammar."""

    kind: Literal["json_schema", "regex", "ebnf", "lark"]
    """`ebnf` is GBNF (`root ::= ...`), as llama.cpp and SGLang have it; `lark` is llguidance's own form (`start: ...`)."""
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. The seed is per request: the noise depends on (seed, position) alone."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy: the most likely token; its log-prob is 0, since the distribution has one point."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no limit."""
    min_p: float = 0.0
    """Leave out, after top-k and top-p, what is less likely than this fraction of the most likely token (arXiv 2407.01082). 0: nothing."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in the context or the reply are divided by it, negative ones multiplied (arXiv 1909.05858). 1: none."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that was sampled already."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that it was sampled already."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), before any penalty."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Texts that end the reply. The token that completes a stop text is the reply's last. Code that
    shows the reply cuts its text with `text_before`."""
    min_tokens: int = 0
    """Minimum length of the reply in tokens. Before it no stop token is drawn, and no stop text ends
    the reply."""
    grammar: Grammar | None = None
    """Draw only tokens that keep the reply in this grammar, and end it only where the grammar does. Log-probs are of what is left, after
    bias and penalties. A reply that may not go on and has no stop token ends by itself."""
    seed: int = 0
    raw_logprobs: bool = False
    """Also tell each token's log-prob under the model's own distribution: temperature 1, nothing added and nothing left out."""
    top_logprobs: int = 0
    """Number of most likely tokens of that distribution to return with each sampled token."""
    nucleus: bool = False
    """Also tell the token ids that each token was drawn from, where top_k, top_p or min_p leave any out."""
    routes: bool = False
    """Also tell the experts that tokens of a mixture went to."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not (self.temperature >= 0 and isfinite(self.temperature)):
            raise ValueError(f"temperature must be finite and not negative, not {self.temperature}")
        if self.temperature > MAX_TEMPERATURE:
            raise ValueError(f"temperature must be at most {MAX_TEMPERATURE:g}, where all tokens are alike, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], not {self.min_p}")
        for name in ("top_k", "min_tokens", "top_logprobs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        self._check_penalties()
        if self.grammar is not None and self.min_tokens:
            raise ValueError(f"min_tokens cannot be {self.min_tokens} with a grammar, which may be at its end before")
        if not all(self.stop):
            raise ValueError("a stop text must not be empty")

    def _check_penalties(self) -> None:
        """Within what other engines take: nothing here can make a logit infinite, which would end everyone's step."""
        if not 0.1 <= self.repetition_penalty <= 10:
            raise ValueError(f"repetition_penalty must be in [0.1, 10] (1: none), not {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} must be in [-2, 2], not {getattr(self, name)}")
        for token, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise ValueError(f"logit_bias must be in [-100, 100], not {bias} (token {token})")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias names a token twice")

    @property
    def narrows(self) -> bool:
        """True if top-k, top-p or min-p removes tokens from the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def text_before(text: str, stop: tuple[str, ...]) -> str:
    """The part of `text` before the first stop text in it; all of `text` if it has none."""
    return text[: min((at for each in stop if (at := text.find(each)) >= 0), default=len(text))]


_REQUEST_COLUMNS: Columns = {"tokens": Ints}
_CHUNK_COLUMNS: Columns = {"tokens": Ints, "logprobs": Floats, "raw_logprobs": Floats, "nucleus": Ragged}
_SCORED_COLUMNS: Columns = {"logprobs": Doubles}
_NO_LOGPROBS, _NO_NUCLEI, _NO_ROUTES = Floats(), Ragged(), Routes()


@dataclass(frozen=True, slots=True)
class Request:
    """One model call: continue `tokens`."""

    id: str
    tokens: Ints
    """The whole context, from the first prompt token on."""
    sampling: SamplingParams
    conversation: str = ""
    """Requests of one conversation extend each other; the engine may keep its cache between them until it is released."""
    rank: tuple[int, ...] = ()
    """Rank among concurrent requests; a deterministic engine admits requests in this order."""
    chunk_tokens: int = 0
    """Tokens per delivered chunk; 0: one chunk at the end (or at an abort)."""
    num_begun: int = 0
    """Number of last entries of `tokens` that were sampled as the beginning of this reply. For the
    options they are part of the reply: stop texts may begin in them, and penalties, min_tokens and a
    grammar count them. max_tokens counts only the tokens still to come."""
    routes_from: int = 0
    """First token of the context whose predecessor's experts are reported, where the request asks for them."""

    def __post_init__(self) -> None:
        to_columns(self, _REQUEST_COLUMNS)


@dataclass(frozen=True, slots=True)
class ReplyLatency:
    """Seconds that an engine took for the parts of a reply."""

    queue_s: float
    """From the request to its admission."""
    prefill_s: float
    """From there to its first token."""
    decode_s: float
    """From there to its end, waits of a preempted or paused request included."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a reply. The last one of a request carries its finish reason."""

    tokens: Ints
    logprobs: Floats
    version: int
    """The policy version that sampled all of this chunk's tokens."""
    finish: Finish | None = None
    raw_logprobs: Floats = _NO_LOGPROBS
    """Each token's under the model's own distribution, where the request asked for them."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the (id, log-prob) of the most likely ones under that distribution, where the request asked for them."""
    nucleus: Ragged = _NO_NUCLEI
    """As in `Turn`, where the request asked for it."""
    routes: Routes = _NO_ROUTES
    """As in `Turn`, where the request asked for them: of each token; in the first chunk with tokens of the context's before these, from
    `Request.routes_from` on. What a chunk without tokens has is nothing."""
    num_cached: int = field(default=0, compare=False)
    """Tokens of the request's context that were in the cache when the request was first admitted. Not
    compared: two answers are equal whether or not the cache was used."""
    latency: ReplyLatency | None = field(default=None, compare=False)
    """Latency of the whole reply, with its last chunk. None: the engine does not report them, or a token was never sampled."""

    def __post_init__(self) -> None:
        to_columns(self, _CHUNK_COLUMNS)


@dataclass(frozen=True, slots=True)
class Scored:
    """Log-probs of given tokens under a policy: natural logarithms, entry t of `tokens[t + 1]` given
    its predecessors."""

    logprobs: Doubles
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """The (id, log-prob) of the most likely tokens at the same places, where they were asked for."""
    members: tuple[Scored, ...] = field(default=(), compare=False, repr=False)
    """One score per engine copy, for an engine of several copies."""

    def __post_init__(self) -> None:
        to_columns(self, _SCORED_COLUMNS)


@dataclass(frozen=True, slots=True)
class Receipt:
    """An engine's answer to a weight update."""

    version: int
    wire: Mapping[str, str] | None
    """Digest of each tensor as it arrived, by its name in Hugging Face files; None where the engine cannot tell."""
    resident: Mapping[str, str] | None
    """Digest of each tensor as the engine now holds it in its own memory, tied names and buffers included; None likewise."""
    layout: Mapping[str, str] | None = None
    """SHA-256 of each parameter as a server holds it, in its own layout (`whet/engine/layout.py`); None: it does not tell."""
    checksums: Mapping[str, str] | None = None
    """A server's own checksums of its parameters, by process and name, which the trainer cannot compute; None: it does not tell. Servers
    of one layout that hold the same have the same."""
    dtype: str | None = None
    """Type that a server holds its weights in, as torch names it; None: it does not tell, or quantises them."""
    size_bytes: int = 0
    """Size of the tensors that arrived."""
    num_stale_tokens: int = 0
    """Tokens that are still cached from older weights. Anything but 0 is a fault."""
    engine: str = "the engine"
    """Name of the engine in error messages."""
    members: tuple[Receipt, ...] = ()
    """One receipt per engine copy, for an engine of several copies. All copies must hold identical
    weights."""
    sent: Mapping[str, str] | None = None
    """Digests of what the sender wrote in place of the trainer's tensors: quantized weights. None: these themselves."""
    wire_bytes: int = 0
    """Bytes that left the trainer's process, compressed if they were; 0 if the engine reads the
    trainer's own weights."""
    encode_s: float = 0.0
    """Seconds of packing and compressing."""
    wire_s: float = 0.0
    """Seconds of copying, writing or sending, as far as they held up the trainer's stream."""
    load_s: float = 0.0
    """Seconds of taking over, of the slowest member: with a broadcast, what it waited for the trainer, too."""
