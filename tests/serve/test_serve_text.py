"""Text as it comes: whatever the chunks, it only grows, and in the end it is that of all tokens."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.serve.serve_setup import model_folder
from whet.data.template import load_tokenizer
from whet.serve.text import TextStream
from whet.types import text_before


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    tokenizer = load_tokenizer(model_folder(tmp_path_factory.mktemp("text") / "model"))
    return lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


TEXTS = st.text(st.sampled_from("ab né€🙂\n"), max_size=12)


@given(pieces=st.lists(st.binary(max_size=3), max_size=8), stop=st.lists(st.sampled_from(["ab", "aab", "é", "\n\n", "🙂"]), max_size=2))
def test_any_bytes_in_any_pieces(pieces, stop):
    """A decoder of bytes: the hardest case, since every character may be cut anywhere."""

    def decode(tokens):
        return bytes(tokens).decode(errors="replace")

    check(decode, [list(piece) for piece in pieces], tuple(stop), exact=False)


@given(text=TEXTS, size=st.integers(1, 4), stop=st.lists(st.sampled_from(["ab", "aab", "é", "\n\n", "🙂"]), max_size=2))
def test_every_character_comes_whole(text, size, stop):
    tokens = list(text.encode())
    check(
        lambda ids: bytes(ids).decode(errors="replace"),
        [tokens[i : i + size] for i in range(0, len(tokens), size)],
        tuple(stop),
        exact=True,
    )


@given(st.lists(st.lists(st.integers(0, 300), max_size=3), max_size=10))
def test_a_real_tokenizer(decode, pieces):
    check(decode, pieces, (), exact=False)


def check(decode, pieces, stop, *, exact):
    stream, seen = TextStream(decode, stop), [""]
    for piece in pieces:
        stream.push(piece)
        seen.append(stream.certain)
    stream.end()
    seen.append(stream.certain)
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen)), seen
    assert not any(each in stream.certain for each in stop)
    tokens = [token for piece in pieces for token in piece]
    if exact:
        assert stream.certain == text_before(decode(tokens), stop)
        assert not any("\ufffd" in text for text in seen)


def test_a_text_is_given_out_as_soon_as_it_is_certain():
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), ("stop",))
    seen = []
    for byte in "né stock stop!".encode():
        stream.push([byte])
        seen.append(stream.certain)
    assert seen[:4] == ["n", "n", "né", "né "] and "né stock" in seen
    assert seen[-1] == "né stock "
