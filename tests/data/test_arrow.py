"""The same rows in jsonl and in parquet are the same rows."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from pyarrow import parquet

from whet.data.config import SupervisedConfig
from whet.data.files import read_rows
from whet.data.messages import messages_from, tools_from
from whet.data.supervised import read_conversations


def both(tmp_path, rows, **options):
    """The rows as read from either format, with which they were written."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows, **options), tmp_path / "rows.parquet")
    return [[row.values for row in read_rows(str(tmp_path / f"rows.{kind}"))] for kind in ("jsonl", "parquet")]


def call(name, arguments, id="c"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


ROWS = [
    {
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "tool_calls": [call("a", {"x": 1}), call("b", {"y": {"z": [{"p": 1}, {"q": "s"}]}}, "d")]},
            {"role": "tool", "content": "1", "tool_call_id": "c", "name": "a"},
            {"role": "assistant", "content": "so"},
        ],
        "tools": [tool("a", x={"type": "integer"}), tool("b", y={"type": "object", "enum": ["k"]})],
        "metadata": {"level": 1, "more": {"deep": {"here": True}}},
    },
    {
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "none", "tool_calls": [call("c", {})]},
            {"role": "tool", "content": "2", "tool_call_id": "c"},
            {"role": "assistant", "content": "so", "step_loss_mask": 1},
        ],
        "tools": [tool("c")],
        "metadata": {"source": "m", "more": {"deep": {"there": 2}}},
    },
]


def test_conversations_are_the_same_in_both_formats(tmp_path):
    lines, columns = both(tmp_path, ROWS)
    for line, column in zip(lines, columns, strict=True):
        assert column["tools"] == line["tools"] and column["metadata"] == line["metadata"]
        assert tools_from(column["tools"], "") == tools_from(line["tools"], "")
        assert [m.get("tool_calls") for m in column["messages"]] == [m.get("tool_calls") for m in line["messages"]]
    ways = [read_conversations(SupervisedConfig(path=str(tmp_path / f"rows.{kind}"))) for kind in ("jsonl", "parquet")]
    for line, column in zip(*ways, strict=True):
        assert (line.messages, line.tools, line.silent) == (column.messages, column.tools, column.silent)


def test_a_null_that_was_written_stays_where_parquet_can_tell(tmp_path):
    rows = [
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [call("a", {"unit": None, "x": [None, 1]})]}], "label": None}
    ]
    lines, columns = both(tmp_path, rows)
    assert lines == columns == rows
    text = [{"arguments": json.dumps({"unit": None})}, {"arguments": json.dumps({"x": 1})}]
    assert both(tmp_path, text)[1] == text


def test_messages_read_the_same_with_and_without_null(tmp_path):
    lines, columns = both(tmp_path, [{"messages": [{"role": "user", "content": "u", "name": None}, {"role": "assistant", "content": "a"}]}])
    assert messages_from(lines[0]["messages"], "") == messages_from(columns[0]["messages"], "")


@pytest.mark.parametrize("wrap", [pa.list_, pa.large_list, lambda kind: pa.list_(kind, 2)])
def test_every_kind_of_list_and_map_is_read_as_json_has_it(tmp_path, wrap):
    struct = pa.struct([("a", pa.int64()), ("b", wrap(pa.struct([("c", pa.string()), ("d", pa.int64())])))])
    schema = pa.schema([("rows", wrap(struct)), ("known", pa.map_(pa.string(), struct)), ("plain", pa.int64())])
    inner = [{"c": "x"}, {"d": 2}]
    rows = [{"rows": [{"a": 1}, {"b": inner}], "known": {"k": {"a": 1}, "l": {"b": inner}}, "plain": None}]
    table = [{**rows[0], "known": list(rows[0]["known"].items())}]
    parquet.write_table(pa.Table.from_pylist(table, schema=schema), tmp_path / "rows.parquet")
    assert [row.values for row in read_rows(str(tmp_path / "rows.parquet"))] == rows
