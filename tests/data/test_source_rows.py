"""From columns to tasks."""

from __future__ import annotations

import datetime
import json

import pytest
from pydantic import ValidationError

from whet.config import ConfigError, load_config
from whet.data.files import Row
from whet.data.rows import RowConfig, task_from
from whet.data.source import SourceConfig, load_tasks
from whet.types import Message, ToolCall

QUESTION = "Natalia sold 48 clips in April and half as many in May. How many altogether?"
ANSWER = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24 = <<48+24=72>>72.\n#### 72"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def task(values, **config):
    return task_from(Row(values, "rows.jsonl:3"), RowConfig(**config), "t/2#0")


def failure(values, **config):
    with pytest.raises(ValueError) as error:
        task(values, **config)
    assert str(error.value).startswith("rows.jsonl:3: "), str(error.value)
    return str(error.value)


def test_a_row_of_gsm8k():
    config = {"prompt_key": "question", "label_key": "answer", "label_pattern": "#### (.+)"}
    made = task({"question": QUESTION, "answer": ANSWER}, system_prompt="Be brief.", **config)
    assert made.prompt == (Message("system", "Be brief."), Message("user", QUESTION))
    assert (made.label, made.metadata, made.tools) == ("72", {"answer": ANSWER}, ()), "the label is a part of its column"
    assert (made.id, made.origin) == ("t/2#0", "rows.jsonl:3")


def test_messages_keep_calls_replies_and_their_own_system_message():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    bare_call = {"function": {"name": "add", "arguments": {"a": 2}}}
    prompt = [
        {"role": "system", "content": "own"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call, bare_call]},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"},
    ]
    assert task({"prompt": prompt}, system_prompt="other").prompt == (
        Message("system", "own"),
        Message("user", "one two"),
        Message("assistant", "", (ToolCall("add", {"a": 1}, "c1"), ToolCall("add", {"a": 2}))),
        Message("tool", "3", name="add", tool_call_id="c1"),
    )


def test_without_chat_the_text_stands_as_it_is():
    assert task({"prompt": "1+1="}, chat=False).prompt == "1+1="
    assert "expected text (chat = false)" in failure({"prompt": [{"role": "user", "content": "x"}]}, chat=False)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{q}\nAnswer after ####.", "a {n} b\nAnswer after ####."),
        (r"{q} in \boxed{}", r"a {n} b in \boxed{}"),
        (r"\boxed{{{n}}} {{q}}", r"\boxed{3} {q}"),
        ("{two words}{f}", "x1.5"),
    ],
)
def test_a_template_is_filled_once(template, text):
    row = {"q": "a {n} b", "n": 3, "two words": "x", "f": 1.5}
    assert task(row, prompt_template=template, chat=False).prompt == text


@pytest.mark.parametrize("template", ["{q.__class__}", "{q!r}", "{q:>9}", "{0}", "{other}"])
def test_a_template_reaches_columns_only(template):
    message = failure({"q": "text"}, prompt_template=template)
    assert "there is no column" in message and "the columns are q" in message and "{{" in message


def test_a_template_takes_text_and_numbers_only():
    assert "column 'q' holds a list" in failure({"q": []}, prompt_template="{q}")


@pytest.mark.parametrize(("value", "label"), [("72", "72"), (72, "72"), (7.5, "7.5"), (5.0, "5.0"), (None, None)])
def test_labels_are_text(value, label):
    assert task({"prompt": "x", "label": value}).label == label


def test_metadata_and_tools_may_be_json_text():
    for encode in (json.dumps, lambda value: value):
        made = task({"prompt": "x", "metadata": encode({"a": [1]}), "tools": encode([TOOL])})
        assert (made.metadata, made.tools) == ({"a": [1]}, (TOOL,))
    made = task({"prompt": "x", "metadata": None, "tools": None})
    assert (made.metadata, made.tools) == ({}, ())
    assert task({"prompt": "x", "metadata": 5}, metadata_key=None).metadata == {}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"promt": "x", "label": "y"}, ["no column 'prompt' (prompt_key)", "promt, label", "did you mean 'promt'"]),
        ({"prompt": 3}, ["column 'prompt' holds a number (3)", "expected text or a list of messages"]),
        ({"prompt": ""}, ["column 'prompt'", "is empty text"]),
        ({"prompt": []}, ["column 'prompt'", "empty list"]),
        ({"prompt": ["x"]}, ["message 0 is text ('x')", "role and content"]),
        ({"prompt": [{"content": "x"}]}, ["message 0 has no role"]),
        ({"prompt": [{"role": "user"}]}, ["message 0 has no content"]),
        ({"prompt": [{"role": 1, "content": "x"}]}, ["role is a number (1), expected text"]),
        ({"prompt": [{"role": "user", "content": "x", "weight": 1}]}, ["key 'weight'", "not supported", "tool_calls"]),
        ({"prompt": [{"role": "user", "content": 3}]}, ["content is a number (3)"]),
        ({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}, ["'image_url'", "media is not supported"]),
        ({"prompt": [{"role": "user", "content": [{"text": "x"}]}]}, ["expected {", '"type": "text"']),
        ({"prompt": [{"role": "a", "tool_calls": {"x": 1}}]}, ["tool_calls is an object", "expected a list"]),
        ({"prompt": [{"role": "a", "tool_calls": [{"name": "f"}]}]}, ["message 0, tool call 0", '"function"']),
        (
            {"prompt": [{"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            ["tool call 0: arguments", "not valid JSON"],
        ),
        (
            {"prompt": [{"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]},
            ["arguments are a list", "expected an object"],
        ),
        ({"prompt": "x", "label": True}, ["column 'label' holds a boolean (True)", "expected text or a number"]),
        ({"prompt": "x", "label": ["a"]}, ["column 'label' holds a list (['a'])"]),
        ({"prompt": "x", "metadata": "{bad"}, ["column 'metadata'", "not valid JSON"]),
        ({"prompt": "x", "metadata": "[1]"}, ["column 'metadata' holds a list ([1]), expected an object"]),
        ({"prompt": "x", "metadata": {"d": datetime.date(2024, 1, 1)}}, ["column 'metadata'", "date"]),
        ({"prompt": "x", "tools": {"name": "f"}}, ["column 'tools' holds an object", "expected a list"]),
        ({"prompt": "x", "tools": [{"name": "f"}]}, ["column 'tools', tool 0 is an object", '"type": "function"']),
    ],
)
def test_a_wrong_value_is_named_with_its_place(values, parts):
    message = failure(values)
    assert all(part in message for part in parts), message


def test_a_label_that_does_not_match_is_an_error():
    config = {"label_pattern": "#### (.+)"}
    assert "label_pattern '#### (.+)'" in failure({"prompt": "x", "label": "72"}, **config)
    assert "holds null" in failure({"prompt": "x", "label": None}, **config)
    assert "no column 'label' (label_key)" in failure({"prompt": "x"}, **config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"label_pattern": "("}, "not a regular expression"),
        ({"label_pattern": "####"}, "expected one group in parentheses, found 0"),
        ({"label_pattern": "(a)", "label_key": None}, "label_pattern needs a label_key"),
        ({"chat": False, "system_prompt": "x"}, "system_prompt needs chat = true"),
    ],
)
def test_settings_that_contradict(settings, message):
    with pytest.raises(ValidationError, match=message):
        RowConfig(**settings)


def tasks(folder, rows, **config):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(SourceConfig(path=str(path), **config))


def test_default_columns_may_be_absent_and_chosen_ones_not(tmp_path):
    rows = [{"prompt": "x", "lable": "1"}]
    assert tasks(tmp_path, rows)[0].label is None
    for key in ("label_key", "metadata_key", "tools_key"):
        with pytest.raises(ValueError, match=rf"no column 'labels' \({key}\); the columns are prompt, lable; did you"):
            tasks(tmp_path, rows, **{key: "labels"})


def test_a_label_missing_in_some_rows_is_an_error(tmp_path):
    rows = [{"prompt": "x", "label": None}, {"prompt": "y"}, {"prompt": "z"}]
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: there is no column 'label'.*write null"):
        tasks(tmp_path, rows)


def test_a_chosen_column_may_be_missing_in_some_rows(tmp_path):
    made = tasks(tmp_path, [{"prompt": "x"}, {"prompt": "y", "info": {"a": 1}}], metadata_key="info")
    assert [task.metadata for task in made] == [{}, {"a": 1}]


def test_a_source_is_configured_like_everything_else():
    config = load_config(SourceConfig, None, ["path=a.jsonl@[:5]", "label_key=none", "label_pattern=null"])
    assert (config.path, config.label_key) == ("a.jsonl@[:5]", None)
    with pytest.raises(ConfigError, match="path = \\[\\]: expected a length of at least 1"):
        load_config(SourceConfig, None, ["path=[]"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_label_that_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match=rf"column 'label' holds {value}, expected text or a finite number; write null"):
        task_from(Row({"prompt": "a", "label": value}, "rows.parquet:1"), RowConfig(), "t")


def test_all_columns_reach_rewards_as_metadata():
    """Under their own names, below what the metadata column says; what JSON does not have is left out."""
    row = {"prompt": "x", "label": "1", "tools": None, "level": 3, "day": datetime.date(2024, 1, 2), "tags": ["a"], "raw": b"x"}
    row["nan"] = float("nan")
    made = task({**row, "metadata": {"level": 5}})
    assert made.metadata == {"level": 5, "day": "2024-01-02", "tags": ["a"], "nan": None}
    assert task({"q": "x", "level": 3}, prompt_template="{q}?").metadata == {"q": "x", "level": 3}
    assert task(row, metadata_key=None).metadata == {}
    json.dumps(made.metadata, allow_nan=False)


def test_a_column_may_be_a_key_in_one(tmp_path):
    """A column of that very name comes first, and what holds the key stays part of the metadata."""
    row = {"extra": {"question": "x", "more": {"n": 3}}, "reward_model": {"ground_truth": "72", "style": "rule"}, "a.b": "y"}
    keys = {"prompt_key": "extra.question", "label_key": "reward_model.ground_truth"}
    (made,) = tasks(tmp_path, [row], **keys)
    assert (made.prompt[0].content, made.label) == ("x", "72")
    assert made.metadata["reward_model"] == {"ground_truth": "72", "style": "rule"} and made.metadata["extra"]["more"] == {"n": 3}
    (other,) = tasks(tmp_path, [row], prompt_key="a.b", label_key="extra.more.n", metadata_key="extra.more")
    assert (other.prompt[0].content, other.label, other.metadata["n"]) == ("y", "3", 3)
    assert tasks(tmp_path, [row], prompt_template="{extra.question}!", label_key=None)[0].prompt[0].content == "x!"
    with pytest.raises(ValueError, match=r"no column 'reward_model\.truth' \(label_key\); the columns are"):
        tasks(tmp_path, [row], prompt_key="a.b", label_key="reward_model.truth")
