"""JSON by the letter: what Python's own reader lets through, and what must come out as it went in."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.data.messages import metadata_from, tools_from
from whet.data.strict_json import MAX_DIGITS, parse_json

TEXT = st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@given(value=VALUES, ascii_only=st.booleans())
def test_every_json_value_is_read_as_python_reads_it(value, ascii_only):
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text) == json.loads(text) == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("NaN", "NaN is no JSON value; write null"),
        ('{"a": [1, -Infinity]}', "-Infinity is no JSON value"),
        ("[1e999]", "the number 1e999 is too large for a float; write it as text"),
        ("-" + "9" * MAX_DIGITS, rf"the integer -9{{19}}\.\.\. has {MAX_DIGITS + 1} digits, over the limit of {MAX_DIGITS}"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "the key 'b' occurs 2 times in one object"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a": "x\\ud83d"}', r"\\ud83d is half of a surrogate pair"),
        ('{"\\uDe00": 1}', r"\\ude00 is half of a surrogate pair"),
    ],
)
def test_what_is_no_json_or_means_two_things_is_refused(text, words):
    with pytest.raises(ValueError, match=words) as error:
        parse_json(text)
    assert not isinstance(error.value, json.JSONDecodeError)


def test_what_only_looks_like_it_is_read():
    assert parse_json('{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}
    assert parse_json('["\\\\ud83d", "NaN"]') == ["\\ud83d", "NaN"]
    assert parse_json("9" * MAX_DIGITS) == int("9" * MAX_DIGITS)
    assert parse_json('[{"a": 1}, {"a": 2}]') == [{"a": 1}, {"a": 2}]


def test_json_inside_a_column_is_read_the_same_way():
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: column 'metadata' holds text .*: the key 'a' occurs 2 times"):
        metadata_from('{"a": 1, "a": 2}', "rows.jsonl:3: column 'metadata'")
    with pytest.raises(ValueError, match=r"column 'tools' holds text .*: its lists and objects are nested too deeply"):
        tools_from("[" * 100_000, "rows.jsonl:3: column 'tools'")


def test_a_key_that_is_there_twice_among_many_is_found_in_no_time():
    keys = ", ".join(f'"k{i}": 0' for i in range(300_000))
    begin = time.monotonic()
    with pytest.raises(ValueError, match="the key 'k299999' occurs 2 times"):
        parse_json(f'{{{keys}, "k299999": 1}}')
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("one", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("levels", [150, 400, 900, 100_000])
def test_levels_are_bounded_on_every_python(one, levels):
    text = one * levels + "1" + "".join({"[": "]", "{": "}"}[char] for char in reversed(one * levels) if char in "[{")
    if levels * sum(char in "[{" for char in one) <= 200:
        assert parse_json(text)
    else:
        with pytest.raises(ValueError, match="nested too deeply to be read"):
            parse_json(text)


def test_brackets_in_texts_are_no_levels():
    assert parse_json('{"a": "' + "[{" * 5000 + '"}') == {"a": "[{" * 5000}
    assert len(parse_json("[" + "[],{}," * 5000 + "1]")) == 10001
