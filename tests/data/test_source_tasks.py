"""The task source: order, epochs, the cursor, and prompts that are too long."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.data.source import Source, SourceConfig, TaskSource, load_tasks


def write(folder, count, prefix="q"):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{prefix}{n}", "label": n}) + "\n" for n in range(count)))
    return str(path)


def rows_of(tasks):
    return [int(task.label) for task in tasks]


@pytest.fixture
def path(tmp_path):
    return write(tmp_path, 5)


def test_each_epoch_has_its_own_seeded_order(path):
    source: Source = TaskSource(SourceConfig(path=path, seed=7), name="train")
    expected = []
    for epoch in range(3):
        order = list(range(5))
        random.Random(7 + epoch).shuffle(order)
        expected += [(row, epoch) for row in order]
    taken = source.next(7) + source.next(8)
    assert [task.id for task in taken] == [f"train/{row}#{epoch}" for row, epoch in expected]
    assert rows_of(taken) == [row for row, _ in expected]
    assert all(task.origin == f"{path}:{int(task.label) + 1}" for task in taken)
    assert len(source) == 5 and source.epoch == 3


def test_without_shuffle_the_order_is_the_files(path):
    source = TaskSource(SourceConfig(path=path, shuffle=False), name="gsm8k")
    assert source.epoch == 0
    taken = source.next(12)
    assert [task.id for task in taken[4:7]] == ["gsm8k/4#0", "gsm8k/0#1", "gsm8k/1#1"]
    assert source.epoch == 2
    assert load_tasks(SourceConfig(path=path), name="gsm8k") == taken[:5]


@settings(max_examples=40, deadline=None)
@given(before=st.lists(st.integers(1, 9), max_size=4), after=st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_restored_source_continues_where_it_was(tmp_path_factory, before, after):
    config = SourceConfig(path=write(tmp_path_factory.mktemp("resume"), 5))
    source = TaskSource(config)
    for n in before:
        source.next(n)
    state = json.loads(json.dumps(source.state()))
    resumed = TaskSource(config)
    resumed.restore(state)
    assert resumed.epoch == source.epoch
    assert [resumed.next(n) for n in after] == [source.next(n) for n in after]
    assert resumed.state() == source.state()


def test_a_source_can_be_set_back(path):
    source = TaskSource(SourceConfig(path=path))
    state = source.state()
    first = source.next(8)
    source.restore(state)
    assert source.next(8) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 4}, "taken with length 5, not 4"),
        ({"prefix": "other"}, r"taken over other rows \(as many, but those that were taken are not the same\): go on with the data"),
        ({"seed": 1}, "taken with seed 42, not 1"),
        ({"shuffle": False}, "taken with shuffle True, not False"),
    ],
)
def test_a_position_in_other_data_is_refused(tmp_path, change, message):
    source = TaskSource(SourceConfig(path=write(tmp_path, 5)))
    untouched = source.state()
    source.next(1)
    state = source.state()
    path = write(tmp_path, change.pop("rows", 5), change.pop("prefix", "q"))
    other = TaskSource(SourceConfig(path=path, **change))
    with pytest.raises(ValueError, match=message):
        other.restore(state)
    other.restore(untouched)
    assert other.state() == TaskSource(SourceConfig(path=path, **change)).state(), "a position from which nothing was taken binds nobody"


@pytest.mark.parametrize("num_taken", [1, 3, 5, 7, 23])
def test_a_corrected_row_does_not_move_the_position(tmp_path, num_taken):
    """A label and metadata anywhere, a prompt where it was not taken yet; else the prompt that was trained on would be told wrongly."""
    path = tmp_path / "train.jsonl"
    rows = [{"prompt": f"q{i}", "label": str(i), "metadata": {"n": i}} for i in range(5)]

    def source():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return TaskSource(SourceConfig(path=str(path)))

    first = source()
    taken = {int(task.id.split("/")[1].split("#")[0]) for task in first.next(num_taken)}
    state = json.loads(json.dumps(first.state()))
    for i, row in enumerate(rows):
        row.update(label=f"corrected {i}", metadata={})
        if i not in taken:
            row["prompt"] = f"corrected {i}"
    mended = source()
    mended.restore(state)
    assert [task.id for task in mended.next(9)] == [task.id for task in first.next(9)]
    rows[min(taken)]["prompt"] = "another"
    with pytest.raises(ValueError, match="those that were taken are not the same"):
        source().restore(state)


def test_a_call_that_was_written_otherwise_is_another_prompt(tmp_path):
    def source(arguments):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        prompt = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "so?"}]
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": prompt}) + "\n")
        return TaskSource(SourceConfig(path=str(tmp_path / "rows.jsonl"), label_key=None))

    first = source('{"a":1}')
    first.next(1)
    source('{"a":1}').restore(first.state())
    with pytest.raises(ValueError, match="those that were taken are not the same"):
        source('{"a": 1}').restore(first.state())


def test_a_broken_position_is_refused(path):
    source = TaskSource(SourceConfig(path=path))
    with pytest.raises(ValueError, match="position of source 'train' is -1"):
        source.restore({**source.state(), "num_taken": -1})


def test_long_prompts_are_dropped_and_counted(path):
    def length(task):
        return 10 * int(task.label)

    source = TaskSource(SourceConfig(path=path, max_prompt_tokens=20, shuffle=False), length=length)
    assert (len(source), source.num_dropped) == (3, 2)
    assert [task.id for task in source.next(4)] == ["train/0#0", "train/1#0", "train/2#0", "train/0#1"]
    assert TaskSource(SourceConfig(path=path), length=length).num_dropped == 0
    ids = [task.id for task in load_tasks(SourceConfig(path=f"{path}@[3:]", max_prompt_tokens=30), length=length)]
    assert ids == ["train/0#0"]


def test_when_every_prompt_is_too_long_the_lengths_are_told(path):
    config = SourceConfig(path=path, max_prompt_tokens=2)
    with pytest.raises(ValueError, match=r"longer than max_prompt_tokens = 2: they have 10 to 14 tokens"):
        TaskSource(config, length=lambda task: 10 + int(task.label))
    with pytest.raises(ValueError, match="no way to count tokens"):
        TaskSource(config)


def test_a_prompt_that_cannot_be_rendered_is_told_at_once(path):
    """The first one where nothing is dropped, since it shows what the settings cannot do; any of them where all are measured."""
    asked: list[str] = []

    def length(task):
        asked.append(task.label)
        if task.label == refused:
            raise ValueError("the tokenizer has no chat template")
        return 1

    refused = "0"
    with pytest.raises(ValueError, match=r"\.jsonl:1: the tokenizer has no chat template"):
        TaskSource(SourceConfig(path=path), length=length)
    assert asked == ["0"]
    refused = "3"
    assert len(TaskSource(SourceConfig(path=path), length=length)) == 5
    with pytest.raises(ValueError, match=r"\.jsonl:4: the tokenizer has no chat template"):
        TaskSource(SourceConfig(path=path, max_prompt_tokens=9), length=length)


def test_an_empty_data_set_is_refused(path, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    for empty in (str(tmp_path / "empty.jsonl"), f"{path}@[5:]"):
        with pytest.raises(ValueError, match="there are no rows in"):
            TaskSource(SourceConfig(path=empty))


def test_at_least_one_task_is_taken(path):
    with pytest.raises(ValueError, match="cannot take 0 tasks"):
        TaskSource(SourceConfig(path=path)).next(0)


@pytest.mark.parametrize(
    ("side", "expected"), [("left", "56789"), ("right", "01234"), ("middle", "01…89")], ids=["left", "right", "middle"]
)
def test_long_prompts_are_cut_in_their_longest_message(tmp_path, side, expected):
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "0123456789"}]
    path.write_text(json.dumps({"prompt": messages}) + "\n" + json.dumps({"prompt": "short"}) + "\n")

    def length(task):
        return sum(len(message.content) for message in task.prompt)

    source = TaskSource(SourceConfig(path=str(path), max_prompt_tokens=9, long_prompts=side, shuffle=False), length=length)
    cut, short = source.tasks
    assert [message.content for message in cut.prompt] == ["Add.", expected] and short.prompt[0].content == "short"
    assert (source.num_dropped, source.num_cut) == (0, 1)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the prompt is longer than max_prompt_tokens = 4 even with its longest text cut"):
        TaskSource(SourceConfig(path=str(path), max_prompt_tokens=4, long_prompts=side), length=length)


def test_long_prompts_may_be_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "0123456789"}) + "\n" + json.dumps({"prompt": "short"}) + "\n")
    config = SourceConfig(path=str(path), max_prompt_tokens=9, long_prompts="error")
    with pytest.raises(ValueError, match=r"rows.jsonl:1: the prompt has 10 tokens, more than max_prompt_tokens = 9, as 1 of 2 have"):
        TaskSource(config, length=lambda task: len(task.prompt[0].content))
