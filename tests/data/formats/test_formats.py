"""Every format reads back what its family writes, tells the model what is wrong, and stands any text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.formats.writing import NOW, TOOL, TOOLS, WRITERS
from whet.data.formats.reading import MAX_ATTEMPTS, typed
from whet.data.formats.table import FORMATS, build_format, format_of_template
from whet.data.parsers import Malformed, Parsed
from whet.types import Message

TRICKY = [
    "",
    " ",
    "007",
    "1e5",
    "true",
    "null",
    "None",
    "[]",
    "{}",
    '"quoted"',
    "it's",
    "\\",
    "\\n",
    "a\nb",
    "\n",
    "  two  ",
    "日本語 😀",
    "a, b",
    "</parameter>",
    "<parameter=x>",
    "</arg_value>",
    "<think>",
    "]",
    ");",
    "x=1",
    "```",
    '{"name": "f"}',
    "key: value",
    "\t",
]
CLEAN = st.text(st.characters(codec="utf-8", exclude_characters="<>|｜", exclude_categories=["Cc"]), max_size=12)
TEXTS = st.sampled_from(TRICKY) | CLEAN
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(CLEAN, inner, max_size=2),
    max_leaves=6,
)
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "count": st.integers(-(10**18), 10**18),
        "share": st.floats(-1e9, 1e9).map(lambda x: round(x, 3)),
        "deep": st.booleans(),
        "items": st.lists(JSON_VALUES, max_size=3),
        "options": st.dictionaries(CLEAN, JSON_VALUES, max_size=3),
        "maybe": st.none() | st.integers(0, 9),
    },
)
CALLS = st.lists(st.tuples(st.just("look_up"), ARGUMENTS) | st.tuples(st.just("now"), st.just({})), min_size=1, max_size=4)
ALONE = {"llama3", "pythonic"}
"""Forms of which a call is the whole reply."""


def pairs(parsed):
    return [(call.name, dict(call.arguments)) for call in parsed.message.tool_calls]


@pytest.mark.parametrize("form", WRITERS)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS, said=st.sampled_from(["", "Let me see."]))
def test_what_is_written_is_read_back(form, calls, said):
    write, chosen = WRITERS[form]
    before = said if form not in ALONE else ""
    if form == "harmony" and said:
        before = f"<|channel|>commentary<|message|>{said}<|end|><|start|>assistant"
    parsed = chosen.parse(before + write(calls), TOOLS)
    assert parsed.malformed == ()
    assert pairs(parsed) == calls
    assert parsed.message.content == ("" if form in ALONE else said)


@pytest.mark.parametrize("form", WRITERS)
def test_calls_within_thinking_are_none(form):
    write, chosen = WRITERS[form]
    call = write([("look_up", {"text": "a"})])
    if form == "harmony":
        parsed = chosen.parse("<|channel|>analysis<|message|>I could write to=functions.look_up {} here", TOOLS)
        assert (parsed.message.tool_calls, parsed.malformed) == ((), ())
        assert parsed.message.reasoning_content == "I could write to=functions.look_up {} here"
        return
    for text in (f"<think>{call}", f"<think>{call}</think>so", f"<think>a</think><think>{call}</think>"):
        parsed = chosen.parse(text, TOOLS)
        assert (parsed.message.tool_calls, parsed.malformed) == ((), ()), text
    after = chosen.parse(f"<think>{call}</think>{call}", TOOLS)
    assert pairs(after) == [("look_up", {"text": "a"})] and after.malformed == ()


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=look_up>",
    "</function>",
    "<parameter=text>",
    "</parameter>",
    "look_up",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "function",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "```json",
    "```",
    "<｜DSML｜tool_calls>",
    "</｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="look_up">',
    "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="text" string="true">',
    '<｜DSML｜parameter name="count" string="false">',
    "</｜DSML｜parameter>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "functions.look_up:0",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|python_tag|>",
    "look_up(",
    "text=",
    "'a'",
    ")",
    "[",
    "]",
    ".call(",
    "<|start|>",
    "<|channel|>",
    "analysis",
    "commentary",
    "final",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    " to=functions.look_up",
    "<|constrain|>",
    "<look_up>",
    "</look_up>",
    "<now>",
    "{",
    "}",
    '{"name": "look_up"',
    '"parameters": {}',
    '"arguments": {}',
    ",",
    ":",
    '"',
    "\\",
    "\n",
    " ",
    "1",
    "9" * 5000,
    "a",
    "😀",
    "\ud800",
    "\x00",
]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=25))
def test_no_text_breaks_a_reader(name, pieces):
    parsed = FORMATS[name].parse("".join(pieces), TOOLS)
    places = [fault.place for fault in parsed.malformed]
    number = len(parsed.message.tool_calls) + len(places)
    assert places == sorted(set(places)) and all(0 <= place < number for place in places)
    assert all(fault.text for fault in parsed.malformed)


@pytest.mark.parametrize("name", FORMATS)
def test_reading_takes_time_in_the_length_of_hostile_text(name):
    size = 1_000_000
    shape = FORMATS[name]
    whole = {form: write([("look_up", {"text": "a"}), ("now", {})]) for form, (write, _) in WRITERS.items()}
    units = [
        *PIECES,
        *(a + b for a in shape.markup for b in ("", "{", '"', "x", "[")),
        *(text[:-9] for text in whole.values()),
        *whole.values(),
    ]
    units += [
        "<tool_call><function=look_up><parameter=text></parameter>",
        "<tool_call>look_up<arg_key>a</arg_key><arg_value></arg_value>",
    ]
    slowest = 0.0
    for unit in units:
        text = unit * (size // len(unit))
        began = time.perf_counter()
        shape.parse(text, TOOLS)
        slowest = max(slowest, time.perf_counter() - began)
    assert slowest < 5.0  # a reader that looks at all of it again for each of its parts would take minutes


def test_a_reply_with_very_many_calls_says_that_not_all_were_read():
    parsed = FORMATS["hermes"].parse(WRITERS["hermes"][0]([("now", {})] * (MAX_ATTEMPTS + 10)), TOOLS)
    assert len(parsed.message.tool_calls) == MAX_ATTEMPTS
    (fault,) = parsed.malformed
    assert fault.place == MAX_ATTEMPTS and "more than 256 tool calls" in fault.text


FAULTS = [
    ("qwen_xml", "<tool_call>\n{}\n</tool_call>", "where <function=...> is due"),
    ("qwen_xml", "<tool_call><function=f><parameter=a>1</function></tool_call>", "a of f is never closed by </parameter>"),
    ("qwen_xml", "<tool_call><function=f><parameter=a>\n1\n</parameter></function>", "never closed by </tool_call>"),
    ("qwen_xml", "<function=f></function>", "a <function= has no <tool_call> before it"),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>", "the <arg_key> a of f has no <arg_value>"),
    ("glm", "<tool_call></tool_call>", 'has no "name"'),
    ("glm", "</tool_call>", "has no <tool_call> before it"),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>",
        "between ```json and ```",
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>f", "has no <｜tool▁call▁begin｜> behind it"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜>", "has no <｜tool▁sep｜>"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>", "must be a JSON object, not list"),
    ("kimi", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", "must be functions.NAME:NUMBER, not 'f'"),
    ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{<|tool_call_end|>", "not valid JSON"),
    (
        "dsml",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">x</｜DSML｜parameter></｜DSML｜invoke>',
        "not valid JSON",
    ),
    ("dsml", "<｜DSML｜invoke></｜DSML｜invoke>", 'must have name="..."'),
    ("llama3", '{"name": "f", "parameters": [1]}', "must be a JSON object, not list"),
    ("llama3", "<|python_tag|>print(1)", "no tool that takes plain code"),
    ("llama3", "[f(1)]", "where key=value or ) is due"),
    ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{", "not valid JSON"),
    ("harmony", "<|channel|>commentary to=functions.f", "has no <|message|>"),
    ("tags", "<look_up>a", "a <look_up> is never closed by </look_up>"),
    ("tags", "</look_up>", "has no <look_up> before it"),
]


@pytest.mark.parametrize(("name", "text", "words"), FAULTS)
def test_a_malformed_call_says_what_is_wrong(name, text, words):
    parsed = FORMATS[name].parse(text, TOOLS)
    assert parsed.message.tool_calls == ()
    (fault,) = parsed.malformed
    assert words in fault.text and fault.place == 0


def test_faults_know_their_places_in_a_section():
    good = "<|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    bad = good.replace("{}", "{")
    parsed = FORMATS["kimi"].parse(f"<|tool_calls_section_begin|>{bad}{good}{bad}<|tool_calls_section_end|>", TOOLS)
    assert [call.id for call in parsed.message.tool_calls] == ["functions.now:3"]
    assert [fault.place for fault in parsed.malformed] == [0, 2]


def test_harmony_keeps_its_channels_apart():
    text = (
        "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Then.<|end|><|start|>assistant to=functions.look_up<|channel|>commentary json"
        '<|message|>{"text": "<|end|"}'
    )
    parsed = FORMATS["harmony"].parse(text, TOOLS)
    assert parsed.message.reasoning_content == "First.\nThen." and parsed.message.content == "I look."
    assert pairs(parsed) == [("look_up", {"text": "<|end|"})]
    final = FORMATS["harmony"].parse("<|channel|>final<|message|>Paris.", TOOLS)
    assert final == Parsed(Message("assistant", "Paris."))


def test_harmony_takes_plain_code_for_a_tool_of_one_text():
    python = {
        "type": "function",
        "function": {"name": "python", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
    }
    parsed = FORMATS["harmony"].parse("<|channel|>analysis to=python code<|message|>print(1)<|call|>", [python])
    assert pairs(parsed) == [("python", {"code": "print(1)"})]
    assert FORMATS["harmony"].parse("<|channel|>commentary to=python<|message|>print(1)<|call|>").message.tool_calls == ()


def test_llama_s_other_ways_of_calling():
    read = FORMATS["llama3"].parse
    code = {
        "type": "function",
        "function": {"name": "ipython", "parameters": {"type": "object", "properties": {"code": {"type": "string"}}}},
    }
    assert pairs(read('<|python_tag|>{"name": "now", "parameters": {}}', TOOLS)) == [("now", {})]
    assert pairs(read('<|python_tag|>brave_search.call(query="a \\"b\\"")', TOOLS)) == [("brave_search", {"query": 'a "b"'})]
    assert pairs(read('<function=look_up>{"count": 2}</function>', TOOLS)) == [("look_up", {"count": 2})]
    assert pairs(read("<|python_tag|>x = 1\nprint(x)", [code])) == [("ipython", {"code": "x = 1\nprint(x)"})]
    spoken = read('{"name": "now", "parameters": {}} I wait.', TOOLS)
    assert pairs(spoken) == [("now", {})] and spoken.message.content == "I wait."
    plain = '{"answer": 3}'
    assert read(plain, TOOLS) == Parsed(Message("assistant", plain))
    without_tools = '{"name": "Ada", "parameters": {}}'
    assert read(without_tools) == Parsed(Message("assistant", without_tools))


def test_tags_are_the_names_of_the_tools():
    search = {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
        },
    }
    two = {
        "type": "function",
        "function": {"name": "move", "parameters": {"type": "object", "required": ["x", "y"], "properties": {}}},
    }
    read = FORMATS["tags"].parse
    parsed = read("<think><search>no</search></think>I look. <search> who </search>", [search])
    assert pairs(parsed) == [("search", {"query": "who"})] and "I look." in parsed.message.content
    assert read("<answer>3</answer>", [search]) == Parsed(Message("assistant", "<answer>3</answer>"))
    assert read("<search>a</search>", []).message.tool_calls == ()
    assert pairs(read('<move>{"x": 1, "y": 2}</move>', [two])) == [("move", {"x": 1, "y": 2})]
    (fault,) = read("<move>1 2</move>", [two]).malformed
    assert fault == Malformed(
        "move takes x, y, so a JSON object with them is due between <move> and </move>: the tool call is not one JSON object", 0
    )
    assert FORMATS["tags"].stop_texts([search]) == ("</search>", "</answer>")
    assert FORMATS["tags"].wrap(Message("tool", "Found. ")) == "\n\n<information>Found.</information>\n\n"
    assert FORMATS["tags"].wrap(Message("tool", "a</information>b")) == "\n\n<information>a< /information>b</information>\n\n"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "integer"}, "twelve", "twelve"),
        ({"type": "number"}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "1 2", "1 2"),
        ({"type": ["string", "null"]}, "null", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/kind"}, "1", "1"),
        ({"$ref": "#/$defs/self"}, "1", 1),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"type": "object"}, "[1]", "[1]"),
        (None, "[1]", [1]),
        (None, "word", "word"),
        (None, '"word"', '"word"'),
    ],
)
def test_bare_text_is_read_as_the_schema_has_it(schema, text, value):
    properties = {} if schema is None else {"a": schema}
    defs = {"kind": {"enum": ["1"]}, "self": {"$ref": "#/$defs/self"}}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": properties, "$defs": defs}},
    }
    found = typed(text, [tool], "f", "a")
    assert (found, type(found)) == (value, type(value))


def test_the_template_tells_the_format():
    for texts, name in [
        ("<tool_call>{arguments}", "hermes"),
        ("<tool_call><function=x><parameter=y> arguments", "qwen_xml"),
        ("<tool_call>x<arg_key>", "glm"),
        ("<|start|><|channel|>final<|message|>", "harmony"),
        ("<|start_header_id|> 'parameters'", "llama3"),
        ("<｜tool▁calls▁begin｜>```json", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31"),
        ("<｜DSML｜", "dsml"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("{{ messages }}", "hermes"),
        ("", "hermes"),
    ]:
        assert (format_of_template(texts).format.name, format_of_template(texts).fault) == (name, "")
    foreign = format_of_template("[TOOL_CALLS]")
    assert foreign.format.name == "none" and "no built-in parser reads" in foreign.fault and "env.parser" in foreign.fault


def with_tools(text: str, tools: object) -> Parsed:
    return Parsed(Message("assistant", f"{text} {len(tools)}"))  # type: ignore[arg-type]


def test_a_function_of_one_s_own_may_ask_for_the_tools():
    assert build_format("tests.data.formats.test_formats:with_tools").parse("a", [TOOL, NOW]).message.content == "a 2"
