"""Stop texts are found where a decoding of the whole reply has them, however characters are cut into tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from whet.engine.embedded.stops import finish_of
from whet.types import Finish

LETTERS = "abE 。你好é🙂👩‍👧\n"


def in_bytes(pieces):
    """A decoder whose tokens are pieces of UTF-8, as those of byte-level tokenizers are."""
    return lambda tokens: b"".join(pieces[token] for token in tokens).decode("utf-8", errors="replace")


def by_fallback():
    """A decoder of a SentencePiece tokenizer that has bytes for the characters which it does not know."""
    vocab = {
        **{f"<0x{byte:02X}>": byte for byte in range(256)},
        **{text: 256 + i for i, text in enumerate(["▁", "a", "b", "E", "▁a", "ab"])},
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return vocab, lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False)


def sequence(tokens, stop, min_tokens=0):
    sampling = SimpleNamespace(min_tokens=min_tokens, stop_token_ids=(), stop=tuple(stop), max_tokens=10_000)
    request = SimpleNamespace(sampling=sampling)
    return SimpleNamespace(request=request, tokens=[7, *tokens], num_replied=len(tokens), num_sampled=len(tokens), matching=None)


def ends(tokens, stop, decode):
    """How many tokens of the reply there are when it ends; None: it goes on."""
    return next((n for n in range(1, len(tokens) + 1) if finish_of(sequence(tokens[:n], stop), decode) is Finish.STOP), None)


def ends_naively(tokens, stop, decode):
    return next((n for n in range(1, len(tokens) + 1) if any(text in decode(tokens[:n]) for text in stop)), None)


@st.composite
def replies(draw):
    """A text in UTF-8, cut anywhere, and stop texts, some of them out of it."""
    text = draw(st.text(st.sampled_from(LETTERS), min_size=1, max_size=30))
    raw = text.encode()
    cuts = sorted(draw(st.sets(st.integers(1, max(len(raw) - 1, 1)), max_size=len(raw))))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True) if a < b]
    begin = draw(st.integers(0, len(text) - 1))
    inside = text[begin : begin + draw(st.integers(1, 12))]
    others = draw(st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=4), max_size=2))
    return pieces, [inside, *others]


@settings(max_examples=400, deadline=None)
@given(replies())
def test_a_reply_ends_where_its_whole_text_has_a_stop(reply):
    pieces, stop = reply
    decode, tokens = in_bytes(pieces), list(range(len(pieces)))
    assert ends(tokens, stop, decode) == ends_naively(tokens, stop, decode)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("abE 。你🙂"), min_size=1, max_size=25), st.data())
def test_that_holds_for_bytes_of_sentencepiece(text, data):
    vocab, decode = by_fallback()
    tokens = []
    for letter in text:
        known = vocab.get(letter.replace(" ", "▁"))
        tokens += [known] if known is not None else list(letter.encode())
    begin = data.draw(st.integers(0, len(text) - 1))
    stop = [text[begin : begin + data.draw(st.integers(1, 10))]]
    assert ends(tokens, stop, decode) == ends_naively(tokens, stop, decode)


@pytest.mark.parametrize("stop", ["🙂🙂🙂E", "你好你好E", "👩‍👧👩‍👧E", "E", "🙂E"])
def test_a_last_token_that_says_much_more_hides_nothing(stop):
    raw = [bytes([byte]) for byte in ("a" * 40 + stop[:-1]).encode()]
    pieces = [*raw, b"E and much more than the stop text is long, and then some"]
    assert ends(list(range(len(pieces))), [stop], in_bytes(pieces)) == len(pieces)


def test_a_stop_that_ends_before_the_least_length_does_not_count_and_an_overlapping_one_does():
    decode = in_bytes([b"a"])
    reply = [0, 0, 0, 0]
    assert [finish_of(sequence(reply[:n], ["aa"], min_tokens=3), decode) for n in (2, 3)] == [None, Finish.STOP]
    once = in_bytes([b"aa", b"b"])
    assert finish_of(sequence([0, 1], ["aa"], min_tokens=2), once) is None
