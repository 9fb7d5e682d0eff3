"""When a reply is over: a stop token, the end of a stop text or of its grammar, or the token limit."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from whet.engine.embedded.scheduler import Sequence
from whet.types import Finish

Decode = Callable[[Seq[int]], str]
"""Token ids to text, special tokens included."""
HALF = "\ufffd"
"""Decoded form of bytes that are no whole character."""
SLACK = 8
"""Characters that are decoded before those that can hold a stop text: a slice of tokens may lose a space, and begin and end with parts of a
character, of which each byte may look like one."""


def finish_of(sequence: Sequence, decode: Decode | None) -> Finish | None:
    """Why the sequence ends with its last token; None: it goes on."""
    sampling = sequence.request.sampling
    if sequence.num_replied >= sampling.min_tokens:
        if sequence.tokens[-1] in sampling.stop_token_ids:
            return Finish.STOP
        if sampling.stop:
            assert decode is not None, "a request with stop texts was let in without a detokeniser"
            if completes(sequence.tokens[-sequence.num_replied :], sampling.stop, decode):
                return Finish.STOP
    if sequence.matching is not None and sequence.matching.over:
        return Finish.STOP
    return Finish.LENGTH if sequence.num_sampled >= sampling.max_tokens else None


def completes(tokens: Seq[int], texts: Seq[str], decode: Decode) -> bool:
    """True if the last token of a reply completes one of the texts. The reply's end is decoded, as far
    back as a text that ends in the last token can begin. The last token may continue after the text's
    end."""
    wanted = reach = max(map(len, texts)) + SLACK
    while reach < len(tokens) and len(decode(tokens[-reach:-1])) < wanted:
        reach *= 2
    for shift in range(4):  # some decoders make nothing of a run of bytes that begins within a character
        window = tokens[-min(reach + shift, len(tokens)) :]
        now, before = decode(window), decode(window[:-1])
        settled = len(before) if now.startswith(before) else _num_alike(now, before)
        if any((at := now.rfind(text)) >= 0 and at + len(text) > settled for text in texts):
            return True
        if HALF not in now or len(window) == len(tokens):
            return False
    return False


def _num_alike(first: str, second: str) -> int:
    """Number of characters that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
