"""When a reply is over: a stop token, the end of a stop text or of its grammar, or the token limit."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from whet.engine.embedded.scheduler import Sequence
from whet.types import Finish

Decode = Callable[[Seq[int]], str]
"""Token ids to text, special tokens included."""
SLACK = 4
"""Characters decoded before those that can hold a stop text: a slice of tokens may begin with parts of a character, or lose a space."""


def finish_of(sequence: Sequence, decode: Decode | None) -> Finish | None:
    """Why the sequence ends with its last token; None: it goes on."""
    sampling = sequence.request.sampling
    if sequence.num_replied >= sampling.min_tokens:
        if sequence.tokens[-1] in sampling.stop_token_ids:
            return Finish.STOP
        if sampling.stop:
            assert decode is not None, "a request with stop texts was let in without a detokeniser"
            if any(_completes(sequence, text, decode) for text in sampling.stop):
                return Finish.STOP
    if sequence.matching is not None and sequence.matching.over:
        return Finish.STOP
    return Finish.LENGTH if sequence.num_sampled >= sampling.max_tokens else None


def _completes(sequence: Sequence, text: str, decode: Decode) -> bool:
    """Whether the last sampled token ends an occurrence of `text`: the end of the reply is decoded, as far as one can reach back."""
    wanted = reach = len(text) + SLACK
    num = sequence.num_replied
    window = sequence.tokens[-min(reach, num) :]
    while len(window) < num and len(decode(window)) < wanted:
        reach *= 2
        window = sequence.tokens[-min(reach, num) :]
    return decode(window).count(text) > decode(window[:-1]).count(text)
