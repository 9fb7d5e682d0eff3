"""Tool calls read from text: what is a call, what only tried to be one, and that nothing a model writes breaks the reader."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whet.data.formats.hermes import HERMES, parse_hermes
from whet.data.formats.plain import NONE, parse_none
from whet.data.formats.table import build_format
from whet.types import Message, ToolCall

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
CALLS = st.tuples(st.text(min_size=1, max_size=5), st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3))


def call_text(body):
    return f"<tool_call>\n{body}\n</tool_call>"


@given(st.lists(CALLS, max_size=4), st.text("ab \n", max_size=6))
def test_calls_are_read_back_in_order(calls, content):
    texts = [call_text(json.dumps({"name": name, "arguments": arguments}).replace("<", "\\u003c")) for name, arguments in calls]
    parsed = parse_hermes("\n".join([content, *texts]))
    assert parsed.malformed == ()
    assert parsed.message.content == content.strip("\n")
    expected = tuple(ToolCall(name, arguments, f"call_{i}") for i, (name, arguments) in enumerate(calls))
    assert parsed.message.tool_calls == expected


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ('{"name": "f", "arguments": {"x": NaN}}', "NaN is no JSON value"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "JSON object with name and arguments, not list"),
        ("{}", 'no "name"'),
        ('{"name": 3}', 'no "name"'),
        ('{"name": "f", "arguments": "x"}', '"arguments" of f must be a JSON object, not str'),
    ],
)
def test_a_malformed_call_says_what_is_wrong(body, what):
    parsed = parse_hermes("a" + call_text(body))
    assert parsed.message == Message("assistant", "a")
    assert [fault.place for fault in parsed.malformed] == [0]
    assert what in parsed.malformed[0].text


def test_arguments_may_be_left_out():
    assert parse_hermes(call_text('{"name": "now"}')).message.tool_calls == (ToolCall("now", {}, "call_0"),)


def test_faults_know_their_place_among_the_calls():
    good = '{"name": "f", "arguments": {}}'
    parsed = parse_hermes("x" + call_text("{") + call_text(good) + "y" + call_text("[]") + "</tool_call><tool_call>{")
    assert [call.id for call in parsed.message.tool_calls] == ["call_1"]
    assert [fault.place for fault in parsed.malformed] == [0, 2, 3, 4]
    assert ["never closed" in fault.text for fault in parsed.malformed] == [False, False, True, False]
    assert "has no <tool_call> before it" in parsed.malformed[3].text
    assert parsed.message.content == "xy</tool_call>"


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"f"', "\n", "a"]), max_size=30))
def test_nothing_breaks_the_reader(pieces):
    text = "".join(pieces)
    parsed = parse_hermes(text)
    attempts = len(parsed.message.tool_calls) + len(parsed.malformed)
    assert (attempts > 0) == ("<tool_call>" in text or "</tool_call>" in text)
    assert "<tool_call>" not in parsed.message.content


def test_reading_is_linear_in_hostile_text():
    parsed = parse_hermes("<tool_call>" * 200_000)
    assert len(parsed.malformed) == 1


def test_none_reads_nothing():
    text = call_text('{"name": "f"}')
    assert parse_none(text).message == Message("assistant", text)


def test_parsers_are_found_by_name_or_reference():
    assert build_format("hermes") is HERMES
    assert build_format("none") is NONE
    assert build_format("whet.data.formats.plain:parse_none").parse is parse_none
    with pytest.raises(ValueError, match=r"no parser 'hermis'.*'hermes'"):
        build_format("hermis")
    with pytest.raises(ValueError, match="is a dict, not a function"):
        build_format("whet.data.formats.table:FORMATS")
