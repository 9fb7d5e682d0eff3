"""Supervised rows: what trains, what is dropped, and a cursor that continues."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from tests.data.chat_templates import tokenizer_of
from whet.data.config import SupervisedConfig
from whet.data.source import SourceConfig, TaskSource
from whet.data.supervised import Conversation, SupervisedSource, read_conversations, supervised_source
from whet.data.template import Renderer
from whet.types import UNSAMPLED, Message, Origin

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


@pytest.fixture(scope="module")
def renderer():
    return Renderer(tokenizer_of("chatml"))


def write(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(renderer, sample):
    return renderer.decode([t for t, m in zip(sample.tokens, sample.loss_mask, strict=True) if m])


def talk(*texts):
    roles = ("user", "assistant")
    return Conversation(tuple(Message(roles[i % 2], text) for i, text in enumerate(texts)))


def test_rows_of_messages_with_tools(tmp_path, renderer):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "SECRET", "name": "add"},
        {"role": "assistant", "content": "done"},
    ]
    path = write(tmp_path, [{"messages": messages, "tools": json.dumps([TOOL])}])
    (sample,) = supervised_source(SupervisedConfig(path=path), renderer, run_seed=0, name="sft").next(1)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    assert said(renderer, sample) == call + "done<|im_end|>"
    whole = renderer.decode(sample.tokens)
    assert "SECRET" in whole and '"name": "add", "description": "Adds."' in whole
    assert set(sample.origin) == {Origin.PROMPT} and set(sample.versions) == {UNSAMPLED}
    assert sample.group == sample.trajectory == "sft/0#0"
    assert sample.valid and sample.reward == 0.0


def test_prompt_and_response_train_the_response_alone(tmp_path, renderer):
    history = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "EARLIER"), ("user", "b")]]
    path = write(tmp_path, [{"q": "hi", "a": "yes"}, {"q": history, "a": "no"}])
    config = SupervisedConfig(path=path, prompt_key="q", response_key="a", shuffle=False)
    first, second = supervised_source(config, renderer, run_seed=0).next(2)
    assert said(renderer, first) == "yes<|im_end|>"
    assert said(renderer, second) == "no<|im_end|>"
    assert "EARLIER<|im_end|>" in renderer.decode(second.tokens)


def test_long_rows_are_dropped_and_counted(renderer):
    source = SupervisedSource([talk("a", "b"), talk("a", "b" * 50), talk("a", "c")], renderer, max_tokens=30, shuffle=False)
    assert (len(source), source.num_dropped) == (2, 1)
    assert [sample.group for sample in source.next(3)] == ["train/0#0", "train/2#0", "train/0#1"]
    with pytest.raises(ValueError, match=r"every conversation of source 'train' is longer than max_tokens = 5: they have \d+"):
        SupervisedSource([talk("a", "b")], renderer, max_tokens=5)
    longest = len(renderer.supervised(talk("a", "b").messages)[0])
    assert len(SupervisedSource([talk("a", "b")], renderer, max_tokens=longest)) == 1


def test_rows_are_the_kept_conversations_in_the_files_order(renderer):
    source = SupervisedSource([talk("q", "x" * 400), talk("q", "a"), talk("q", "b")], renderer, max_tokens=100)
    rows = list(source.rows())
    assert [said(renderer, sample) for sample in sorted(source.next(2), key=lambda sample: sample.group)] == ["a<|im_end|>", "b<|im_end|>"]
    assert [renderer.decode([t for t, m in zip(*row, strict=True) if m]) for row in rows] == ["a<|im_end|>", "b<|im_end|>"]
    assert all(len(tokens) == len(mask) for tokens, mask in rows)


def test_the_order_is_that_of_a_task_source(tmp_path, renderer):
    path = write(tmp_path, [{"prompt": str(n), "r": str(n)} for n in range(7)])
    config = SupervisedConfig(path=path, prompt_key="prompt", response_key="r", seed=3)
    source = supervised_source(config, renderer, run_seed=0, name="x")
    tasks = TaskSource(SourceConfig(path=path, seed=3), name="x")
    assert [sample.group for sample in source.next(16)] == [task.id for task in tasks.next(16)]
    assert source.epoch == tasks.epoch == 2


def test_a_restored_source_continues(renderer):
    rows = [talk("a", str(n)) for n in range(5)]
    source = SupervisedSource(rows, renderer)
    source.next(7)
    state = json.loads(json.dumps(source.state()))
    other = SupervisedSource(rows, renderer)
    other.restore(state)
    assert other.next(6) == source.next(6)
    with pytest.raises(ValueError, match="source 'train' was taken over other rows"):
        SupervisedSource([*rows[:4], talk("a", "x")], renderer).restore(state)
    with pytest.raises(ValueError, match="source 'train' was taken with seed 42, not 1"):
        SupervisedSource(rows, renderer, seed=1).restore(state)
    with pytest.raises(ValueError, match=r"is -1, expected a count"):
        source.restore({**state, "num_taken": -1})
    with pytest.raises(ValueError, match="cannot take 0"):
        source.next(0)


def test_in_memory_tools_are_told(renderer):
    source = SupervisedSource([Conversation(talk("a", "b").messages, (TOOL,))], renderer)
    assert '"add"' in renderer.decode(source.next(1)[0].tokens)


@pytest.mark.parametrize(
    ("row", "keys", "what"),
    [
        (
            {"prompt": "a", "completion": "b"},
            {},
            r"the columns are prompt, completion; write data\.prompt_key=prompt data\.response_key=completion$",
        ),
        ({"asked": "a", "said": "b"}, {}, r"the columns are asked, said; if .* name them in data\.prompt_key and data\.response_key$"),
        ({"message": []}, {}, r"rows\.jsonl:1.*no column 'messages' \(messages_key\).*did you mean 'message'"),
        ({"messages": "hi"}, {}, r"rows\.jsonl:1: column 'messages' holds .*expected a list"),
        ({"messages": [{"role": "user", "content": "a"}]}, {}, r"rows\.jsonl:1: the conversation has no assistant"),
        ({"q": "a", "r": 3}, {"prompt_key": "q", "response_key": "r"}, r"column 'r' holds a number \(3\), expected text"),
        ({"q": "a"}, {"prompt_key": "q", "response_key": "r"}, r"no column 'r' \(response_key\)"),
        ({"messages": [{"role": "user", "content": "a"}]}, {"tools_key": "t"}, r"no column 't' \(tools_key\)"),
    ],
)
def test_errors_name_the_place(tmp_path, renderer, row, keys, what):
    with pytest.raises(ValueError, match=what):
        supervised_source(SupervisedConfig(path=write(tmp_path, [row]), **keys), renderer, run_seed=0)


def test_tools_can_be_left_unread(tmp_path):
    path = write(tmp_path, [{"messages": [{"role": "user", "content": "a"}], "tools": "not json"}])
    assert read_conversations(SupervisedConfig(path=path, tools_key=None))[0].tools == ()
    with pytest.raises(ValueError, match=r"column 'tools'.*not valid JSON"):
        read_conversations(SupervisedConfig(path=path))


def test_there_must_be_rows(tmp_path, renderer):
    with pytest.raises(ValueError, match="no rows in"):
        supervised_source(SupervisedConfig(path=write(tmp_path, [])), renderer, run_seed=0)
    with pytest.raises(ValueError, match="no conversations"):
        SupervisedSource([], renderer)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"prompt_key": "p"}, "go together"),
        ({"response_key": "r"}, "go together"),
        ({"messages_key": "m", "prompt_key": "p", "response_key": "r"}, "either messages_key, or"),
        ({"messages_key": None}, "either messages_key, or"),
    ],
)
def test_the_two_forms_exclude_each_other(keys, what):
    with pytest.raises(ValidationError, match=what):
        SupervisedConfig(path="x", **keys)
