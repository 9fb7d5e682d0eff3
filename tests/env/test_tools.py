"""Tools: schemas from annotations and docstrings, arguments checked, and every kind of failure in its own form."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from typing import Literal

import pytest
from pydantic import BaseModel

from whet.env.tools import Tool, ToolArgumentError


class Point(BaseModel):
    x: int
    y: int = 0


def search(query: str, limit: int = 3, kind: Literal["web", "news"] = "web") -> list[str]:
    """Search for
    a text.

    Longer explanation that the model does not need.

    Args:
        query: what to look
            for.
        limit (int): how many at most.

    Returns:
        What was found.
    """
    return [query] * limit


async def shift(point: Point, *, by: float = 1.5) -> dict[str, float]:
    """Move a point."""
    await asyncio.sleep(0)
    return {"x": point.x + by}


def odd_names(_x: int, model_y: int, json: str, schema: str = "s") -> str:
    """Names that pydantic keeps to itself."""
    return f"{_x} {model_y} {json} {schema}"


def call(function, arguments, timeout_s: float | None = 10.0):
    return asyncio.run(Tool(function)(arguments, timeout_s)).content


def test_the_schema_is_openai_s():
    assert Tool(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for a text.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "query": {"type": "string", "description": "what to look for."},
                    "limit": {"type": "integer", "default": 3, "description": "how many at most."},
                    "kind": {"type": "string", "enum": ["web", "news"], "default": "web"},
                },
                "required": ["query"],
            },
        },
    }


def test_results_are_text_or_json():
    assert call(search, {"query": "é", "limit": 2}) == '["é", "é"]'
    assert json.loads(call(shift, {"point": {"x": 1}})) == {"x": 2.5}

    def nothing() -> None:
        """Nothing."""

    def text() -> str:
        """Text."""
        return '"as it stands"'

    assert call(nothing, {}) == "null"
    assert call(text, {}) == '"as it stands"'


def test_any_parameter_name_works():
    assert call(odd_names, {"_x": 1, "model_y": 2, "json": "j"}) == "1 2 j s"
    assert list(Tool(odd_names).schema["function"]["parameters"]["properties"]) == ["_x", "model_y", "json", "schema"]


@pytest.mark.parametrize(
    ("function", "arguments", "what"),
    [
        (search, {}, r"search was called with wrong arguments: query: Field required"),
        (search, {"query": "a", "limit": "many"}, r"limit: Input should be a valid integer"),
        (search, {"query": "a", "page": 1}, r"page: Extra inputs are not permitted"),
        (search, {"query": "a", "kind": "x"}, r"kind: Input should be 'web' or 'news'"),
        (search, {"query": 3}, r"query: Input should be a valid string"),
        (shift, {"point": {"x": "a"}}, r"point\.x: Input should be a valid integer"),
        (odd_names, {"parameter_0": 1}, r"_x: Field required.*parameter_0: Extra inputs"),
    ],
)
def test_wrong_arguments_are_told_to_the_model(function, arguments, what):
    with pytest.raises(ToolArgumentError, match=what):
        call(function, arguments)


def test_a_value_error_goes_to_the_model_and_other_errors_do_not():
    def picky(x: int) -> str:
        """Picky."""
        raise ValueError("x must be even") if x == 1 else ValueError if x == 2 else KeyError("k")

    with pytest.raises(ToolArgumentError, match=r"^x must be even$"):
        call(picky, {"x": 1})
    with pytest.raises(ToolArgumentError, match=r"^ValueError$"):
        call(picky, {"x": 2})
    with pytest.raises(KeyError):
        call(picky, {"x": 3})


def test_time_limits_name_the_tool_but_a_tool_s_own_timeout_speaks_for_itself():
    release = threading.Event()

    def slow() -> str:
        """Slow."""
        release.wait(20)
        return ""

    async def slow_too() -> str:
        """Slow."""
        await asyncio.sleep(20)
        return ""

    def own() -> str:
        """Its own."""
        raise TimeoutError("no answer from the server")

    async def own_too() -> str:
        """Its own."""
        raise TimeoutError("no answer from the server")

    for function in (slow, slow_too):
        with pytest.raises(TimeoutError, match=rf"^tool {function.__name__} took longer than 0.01 s"):
            call(function, {}, 0.01)
    release.set()
    for function in (own, own_too):
        with pytest.raises(TimeoutError) as error:
            call(function, {})
        assert str(error.value) == "no answer from the server"
    assert call(search, {"query": "a", "limit": 1}, None) == '["a"]'


def undocumented(x: int) -> int:
    return x


def unannotated(x) -> int:
    """Doc."""
    return x


def variadic(*x: int) -> int:
    """Doc."""
    return 0


def positional(x: int, /) -> int:
    """Doc."""
    return x


def unknown_type(x: Missing) -> int:  # noqa: F821  # pyright: ignore
    """Doc."""
    return 0


def no_schema(x: threading.Event) -> int:
    """Doc."""
    return 0


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (undocumented, "undocumented has no docstring"),
        (unannotated, "unannotated: parameter x has no type annotation"),
        (variadic, r"variadic: parameter \*x: .*cannot be given by name"),
        (positional, "positional: parameter x: .*cannot be given by name"),
        (unknown_type, "unknown_type: name 'Missing' is not defined"),
        (no_schema, "no_schema: a parameter's type has no JSON schema"),
        (functools.partial(search, "a"), "function with a name"),
        (lambda: 1, "function with a name"),
    ],
)
def test_what_cannot_be_a_tool_is_refused_when_it_is_made(function, what):
    with pytest.raises(ValueError, match=what):
        Tool(function)


@pytest.mark.parametrize("make", [object, lambda: {"a": [object()]}, lambda: (x for x in ())], ids=["object", "inside", "generator"])
def test_an_answer_that_is_a_place_in_memory_is_the_tools_failure(make):
    def thing() -> object:
        """A thing."""
        return make()

    with pytest.raises(TypeError, match=r"^it returned <.* at 0x.*>, which says nothing to a model; return text") as error:
        asyncio.run(Tool(thing)({}, None))
    assert "raised by the tool thing" in error.value.__notes__[0]
