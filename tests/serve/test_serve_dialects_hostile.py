"""What a hostile or broken client may send to the routes in blocks and items: it is refused by name or answered, and never a fault."""

import pytest

from tests.serve.serve_setup import live
from tests.serve.test_serve_hostile import GRAMMARS, HELLO, ODD, SCHEMAS, send
from whet.serve.anthropic_body import BLOCKS, MessagesBody, PromptBody, ToolBody
from whet.serve.responses_body import ITEMS, FunctionTool, ResponsesBody

MESSAGES, COUNT, RESPONSES = "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"
GOOD = {
    "text": {"type": "text", "text": "x"},
    "thinking": {"type": "thinking", "thinking": "x"},
    "tool_use": {"type": "tool_use", "id": "a", "name": "add", "input": {}},
    "tool_result": {"type": "tool_result", "tool_use_id": "a", "content": "7"},
    "message": {"type": "message", "role": "user", "content": "x"},
    "function_call": {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
    "function_call_output": {"type": "function_call_output", "call_id": "a", "output": "7"},
    "reasoning": {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
}
ROUTES = {
    MESSAGES: (MessagesBody, {"messages": HELLO, "max_tokens": 1}),
    COUNT: (PromptBody, {"messages": HELLO}),
    RESPONSES: (ResponsesBody, {"input": HELLO, "max_output_tokens": 1}),
}
LISTS = [
    HELLO * 20_000,
    [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": ["x"]}],
    [{"type": ["x"]}],
    [{"type": 3, "role": "user"}],
]
MORE = {
    "messages": LISTS,
    "input": LISTS,
    "tools": [[{}], ["x"], [{"name": 3}], [{"name": "f", "input_schema": {}}] * 600],
    "text": [{"format": {"type": "json_schema", "name": "x", "schema": schema}} for schema in SCHEMAS],
    "output_config": [{"format": {"type": "json_schema", "schema": schema}} for schema in SCHEMAS],
    "context_management": [{"edits": 3}, {"edits": [3]}, {"edits": [{"type": ["x"]}]}],
    **dict.fromkeys(("json_schema", "regex", "ebnf"), GRAMMARS),
}
FIELDS = [(route, field.alias or name) for route, (model, _) in ROUTES.items() for name, field in model.model_fields.items()]
PARTS = [(kind, name) for table in (*BLOCKS.values(), ITEMS) for kind, model in table.items() for name in model.model_fields]


@pytest.fixture(scope="module")
def tried(models):
    """A server whose replies are short whatever is asked for, so that trying takes no time."""
    with live(models[0], engine={"embedded": {"cache_tokens": 64, "block_size": 4}}) as server:
        yield server


def assert_told(path, status, answer, value):
    """Answered, or refused in the one shape that the route has for errors."""
    assert status < 500, (path, status, answer, str(value)[:100])
    if status >= 400:
        shape = {"message", "type"} if path.startswith(MESSAGES) else {"message", "type", "param", "code"}
        assert set(answer["error"]) == shape and len(answer["error"]["message"]) <= 2003, answer


@pytest.mark.parametrize(("route", "field"), FIELDS, ids=[f"{route} {field}" for route, field in FIELDS])
def test_no_value_of_a_field_is_a_fault_of_the_server(tried, route, field):
    _, base = ROUTES[route]
    tool = {"name": "add", "input_schema": {}} if route != RESPONSES else {"type": "function", "name": "add", "parameters": {}}
    for value in [*ODD, *MORE.get(field, [])]:
        body = {**base, field: value}
        if field == "tool_choice":
            body["tools"] = [tool]
        status, answer = send(tried, route, body)
        assert_told(route, status, answer if status >= 400 else None, value)
    assert send(tried, *(route, base))[0] == 200


@pytest.mark.parametrize(("kind", "field"), sorted(set(PARTS)), ids=" ".join)
def test_no_value_in_a_block_or_an_item_is_a_fault_of_the_server(tried, kind, field):
    for value in [*ODD, [GOOD["text"]], [{"type": "image"}]]:
        part = {**GOOD[kind], field: value}
        if kind in ITEMS:
            called = [GOOD["function_call"]] if kind == "function_call_output" else []
            path, body = RESPONSES, {"input": [*called, part, *HELLO], "max_output_tokens": 1}
        else:
            called = [{"role": "assistant", "content": [GOOD["tool_use"]]}] if kind == "tool_result" else []
            role = "assistant" if kind in BLOCKS["assistant"] and kind != "text" else "user"
            path, body = COUNT, {"messages": [*HELLO, *called, {"role": role, "content": [part]}, *HELLO]}
        status, answer = send(tried, path, body)
        assert_told(path, status, answer if status >= 400 else None, value)


@pytest.mark.parametrize(("route", "model"), [(COUNT, ToolBody), (RESPONSES, FunctionTool)])
def test_no_value_in_a_tool_is_a_fault_of_the_server(tried, route, model):
    good = {"name": "add", "input_schema": {}} if model is ToolBody else {"type": "function", "name": "add", "parameters": {}}
    for name in model.model_fields:
        for value in ODD:
            body = {**ROUTES[route][1], "tools": [{**good, name: value}]}
            status, answer = send(tried, route, body)
            assert_told(route, status, answer if status >= 400 else None, value)


def test_blocks_and_parts_are_counted(tried):
    many = [GOOD["text"]] * 9000
    for path, body in (
        (COUNT, {"messages": [{"role": "user", "content": many}, {"role": "assistant", "content": many}, *HELLO]}),
        (COUNT, {"system": many * 2, "messages": HELLO}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 18_000}]}),
    ):
        status, answer = send(tried, path, body)
        assert status == 400 and "16384" in answer["error"]["message"], answer["error"]["message"][:200]
