"""Tokens to text as they come: no half characters, nothing that may turn out to be the beginning of a stop text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whet.data.replies import held_back
from whet.types import JSON, text_before

DecodeText = Callable[[Sequence[int]], str]
"""Token ids to text."""
HALF = "\ufffd"
"""Decoded form of bytes that are not yet a character."""
LONGEST_CHARACTER = 16
"""Tokens that a character may come in; more that decode to none are no character."""


class TextStream:
    """The text of a growing list of tokens.

    Args:
        decode: token ids to text.
        stop: texts that end the reply and are no part of it.
    """

    def __init__(self, decode: DecodeText, stop: tuple[str, ...] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._tokens: list[int] = []
        self._from = self._to = 0
        """Range [from, to) of the tokens last decoded into text: the following ones are decoded after
        them, since a token's text may depend on the one before it."""
        self._text = ""
        self.certain = ""
        """Text that no later token can change. It only grows."""

    def push(self, tokens: Sequence[int]) -> None:
        """More tokens, none of them a stop token."""
        self._tokens.extend(tokens)
        self._take(force=len(self._tokens) - self._to > LONGEST_CHARACTER)
        before = self._before()
        held = max((held_back(before, stop) for stop in self._stop), default=0)
        self.certain += before[: len(before) - held]

    def end(self) -> None:
        """There are no more."""
        self._take(force=True)
        self.certain += self._before()

    def _before(self) -> str:
        """Text after the certain text, up to a stop text: none begins before that."""
        return text_before(self._text[len(self.certain) :], self._stop)

    def _take(self, *, force: bool) -> None:
        before = self._decode(self._tokens[self._from : self._to])
        now = self._decode(self._tokens[self._from :])
        if len(now) > len(before) and (force or not now.endswith(HALF)):
            self._text += now[len(before) :]
            self._from, self._to = self._to, len(self._tokens)


def token_fields(decode: DecodeText, token: int, logprob: float) -> dict[str, JSON]:
    """A token in OpenAI's log-probs; bytes are null for a piece of a character."""
    text = decode([token])
    return {"token": text, "logprob": logprob, "bytes": None if HALF in text else list(text.encode())}
