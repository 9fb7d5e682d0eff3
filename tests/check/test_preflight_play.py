"""Environments and tools, tried out."""

import json
import re

import pytest

from tests.check.small_run import look, module, of, write_rows
from whet.check import boundary, play
from whet.check.tool_calls import arguments_for
from whet.env.tools import ToolResult
from whet.types import Task

AREAS = ("model", "tokenizer", "environment")
ENV = """
import time
LOG = []
class Base:
    tools = ()
    async def start(self, task):
        LOG.append("start")
        return task
    async def step(self, reply):
        LOG.append("step")
    async def close(self):
        LOG.append("close")
"""
RESOURCE = """
from contextlib import asynccontextmanager
from whet.env.resources import per_group, per_run
@asynccontextmanager
async def sandbox(task):
    raise OSError("no room")
    yield
@asynccontextmanager
async def server():
    yield
    raise OSError("gone")
"""


def findings_of(here, code, *more):
    """What is found of the class `Mine` in a user's file."""
    path = here / "mine.py"
    path.write_text(ENV + code)
    (here / "run.toml").write_text((here / "run.toml").read_text().replace('tools = ["calculator"]', "tools = []"))
    findings, context = look(*AREAS, overrides=[f"env.name={path}:Mine", *more])
    return of(findings, "environment", "FAIL"), of(findings, "environment", "ok"), context


def test_tools_are_listed_asked_and_started(here):
    findings, context = look(*AREAS)
    assert of(findings, "environment") == [
        "environment 'tools' started with train.jsonl:1 and closed",
        "tools has calculator(expression)",
        "calculator: wrong arguments are refused, and the refusal is rendered",
    ]
    assert [tool["function"]["name"] for tool in context.tools[""]] == ["calculator"]
    assert context.tools["test"] == context.tools[""] and context.tasks[""].label == "0"


def test_no_tool_of_the_users_is_run(here):
    reference = module(
        here, "tools.py", """
        from pathlib import Path
        def touch(name: str = "x", times: int = 1) -> str:
            \"\"\"Leave a trace.\"\"\"
            Path("trace").write_text("run")
            return "done"
        """,
    )  # fmt: skip
    findings, _ = look(*AREAS, overrides=[f"env.tools=['{reference}:touch', 'calculator']"])
    assert "touch, calculator: wrong arguments are refused" in of(findings, "environment", "ok")[2]
    assert not (here / "trace").exists()


TOOLS = """
from pathlib import Path
from typing import Literal
def touch(name: str, times: int, how: Literal["soft", "hard"], where: list[int] | None = None) -> str:
    \"\"\"Leave a trace.\"\"\"
    with open("trace", "a") as file:
        file.write(f"{name} {times} {how} {where};")
    return "done"
def refuses(name: str = "x") -> str:
    \"\"\"Refuse.\"\"\"
    raise ValueError("there is no " + name)
def breaks() -> str:
    \"\"\"Break.\"\"\"
    return 1 / 0
"""


def test_on_request_each_tool_is_really_called_once(here):
    """With arguments that its schema describes, or those of a call that the row has."""
    path = module(here, "tools.py", TOOLS)
    names = ["env.tools=" + str([f"{path}:{name}" for name in ("touch", "refuses", "breaks")])]
    findings, _ = look(*AREAS, overrides=names, calls_tools=True)
    assert (here / "trace").read_text() == "x 1 soft None;"
    assert of(findings, "environment", "ok")[3:] == ['touch({"name": "x", "times": 1, "how": "soft"}) answered \'done\'']
    assert of(findings, "environment", "warn") == ["refuses({}) answered 'Error: there is no x'"]
    (failed,) = of(findings, "environment", "FAIL")
    assert re.search(r"^breaks\(\{\}\): tool 'breaks': ZeroDivisionError: .*tools.py:\d+ in breaks\)", failed)
    (here / "trace").unlink()
    call = {"type": "function", "function": {"name": "touch", "arguments": {"name": "é", "times": 3, "how": "hard", "where": [7]}}}
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    write_rows(here / "train.jsonl", [{"prompt": [*asked, {"role": "tool", "content": "done"}, {"role": "user", "content": "again"}]}])
    findings, _ = look(*AREAS, overrides=names, calls_tools=True)
    assert (here / "trace").read_text() == "é 3 hard [7];"
    assert "touch(" in of(findings, "environment", "ok")[3] and '"name": "é"' in of(findings, "environment", "ok")[3]


def test_an_environment_that_answers_with_nothing_fails(here):
    path = module(here, "mine.py", ENV + "class Mine(Base):\n    tools = [{'type': 'function', 'function': {'name': 'look'}}]\n")
    findings, _ = look(*AREAS, overrides=[f"env.name={path}:Mine", "env.tools=[]"], calls_tools=True)
    assert of(findings, "environment", "FAIL")[0] == "look({}): env.step returned None; it must return a Step"


SCHEMAS = [
    ('{"name": "look"}', 'expected {"type": "function"'),
    ("3", 'expected {"type": "function"'),
    ('{"type": "function", "function": {"name": "look", "description": {1, 2}}}', "a tool's schema is no JSON"),
    ('{"type": "function", "function": {"name": "look", "parameters": None}}', "of tool 'look' are no JSON schema of an object"),
    ('{"type": "function", "function": {"name": "look", "parameters": {"properties": ["a"]}}}', "are no JSON schema of an object"),
    ('{"type": "function", "function": {"name": "look", "parameters": {"properties": {"a": 3}}}}', "are no JSON schema of an object"),
    ('{"type": "function", "function": {"name": "look", "parameters": {"type": "array"}}}', "are of type 'array'"),
    ('{"type": "function", "function": {"name": "look", "parameters": {"required": ["b"]}}}', r"require \['b'\], which are not among \[\]"),
]


@pytest.mark.parametrize(("schema", "words"), SCHEMAS)
def test_a_schema_that_is_none_fails(here, schema, words):
    fails, _, context = findings_of(here, f"class Mine(Base):\n    tools = [{schema}]\n")
    assert len(fails) == 2 and re.search(words, fails[0]) and fails[1].startswith("test: "), fails
    assert not context.tools, "nobody is told of them"


MADE = [
    ("", "", {}),
    ('"a": {"type": "string"}, "b": {}', '"a"', {"a": "x"}),
    ('"a": {"$ref": "#/$defs/P"}', '"a"', {"a": {"n": "x"}}),
    ('"a": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]}', '"a"', {"a": 5}),
    ('"a": {"type": "array", "items": {"enum": ["p", "q"]}, "minItems": 2}', '"a"', {"a": ["p", "p"]}),
    ('"a": {"default": 4}, "b": {"const": 2}, "c": {"examples": ["e"]}', '"a", "b", "c"', {"a": 4, "b": 2, "c": "e"}),
    ('"a": {"type": ["number", "null"]}, "b": {"type": "boolean"}', '"a", "b"', {"a": 1, "b": False}),
]


@pytest.mark.parametrize(("properties", "required", "made"), MADE)
def test_made_arguments_fit_the_schema(properties, required, made):
    known = '{"P": {"type": "object", "properties": {"n": {}}, "required": ["n"]}}'
    parameters = json.loads(f'{{"properties": {{{properties}}}, "required": [{required}], "$defs": {known}}}')
    assert arguments_for({"type": "function", "function": {"name": "f", "parameters": parameters}}, Task("t", "q")) == made


def test_arguments_of_a_schema_that_names_itself_come_to_an_end():
    itself = {"type": "object", "properties": {"a": {"$ref": "#/$defs/P"}}, "required": ["a"]}
    assert arguments_for({"function": {"name": "f", "parameters": {**itself, "$defs": {"P": itself}}}}, Task("t", "q"))


def test_a_tool_that_takes_anything_fails(here, monkeypatch):
    async def obliging(self, arguments, timeout_s):
        return ToolResult("as you like")

    monkeypatch.setattr("whet.env.tools.Tool.__call__", obliging)
    assert "took arguments that it does not have, and answered 'as you like'" in of(look(*AREAS)[0], "environment", "FAIL")[0]


def test_tools_that_cannot_be_tools_fail(here):
    reference = module(here, "tools.py", "def silent(x: int) -> int:\n    return x\n")
    assert "has no docstring" in of(look(*AREAS, overrides=[f"env.tools=['{reference}:silent']"])[0], "environment", "FAIL")[0]


def test_a_template_without_tool_answers_or_without_tools_is_told(here):
    path = here / "model/chat_template.jinja"
    whole = path.read_text()
    refusal = "{%- for m in messages %}{%- if m.role == 'tool' %}{{ raise_exception('no tools here') }}{%- endif %}{%- endfor %}"
    path.write_text(refusal + whole)
    assert "no tools here" in of(look(*AREAS)[0], "environment", "FAIL")[0]
    path.write_text(whole.replace("or tools", "").replace("if tools", "if false"))
    assert "the chat template leaves tools out" in of(look(*AREAS)[0], "environment", "warn")[0]


@pytest.mark.parametrize(
    ("override", "words"), [("env.parser=none", "no tool is called"), ("rollout.max_turns=1", "before the model can read")]
)
def test_settings_that_keep_tools_from_use_are_told(here, override, words):
    assert words in of(look(*AREAS, overrides=[override])[0], "environment", "warn")[0]


def test_an_environment_of_the_users_is_started_and_closed_once_and_never_stepped(here):
    fails, oks, context = findings_of(
        here, """
class Mine(Base):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"where": {}}}}}]
    async def start(self, task):
        import dataclasses
        LOG.append("start")
        return dataclasses.replace(task, label="changed")
""",
    )  # fmt: skip
    import sys

    log = next(m for name, m in sys.modules.items() if name.startswith("mine_") and m.__file__ == str(here / "mine.py")).LOG
    mine = f"{here / 'mine.py'}:Mine"
    assert fails == [] and log == ["start", "close"] * 2, "for training, and with the evaluation set's own first row"
    assert oks == [
        f"environment {mine!r} started with train.jsonl:1 and closed",
        f"{mine} has look(where)",
        f"test: environment {mine!r} started with test.jsonl:1 and closed",
        f"test: {mine} has look(where)",
    ]
    assert context.tasks[""].label == context.tasks["test"].label == "changed", "the reward is asked about the task that is played"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "class Mine(Base):\n    def __init__(self):\n        raise OSError('gone')\n",
            r"it cannot be made: OSError: gone \(.*mine.py:15\)",
        ),
        ("class Mine(Base):\n    async def start(self, task):\n        return 1 / 0\n", r"ZeroDivisionError: .*mine.py:\d+ in start"),
        ("class Mine(Base):\n    async def close(self):\n        raise KeyError('x')\n", r"KeyError: 'x' \(at .*mine.py:\d+ in close"),
        (
            "import dataclasses\n"
            "class Mine(Base):\n    async def start(self, task):\n        return dataclasses.replace(task, id='other')\n",
            r"changed the task's id from 'check/0#0' to 'other'",
        ),
        ("class Mine(Base):\n    async def start(self, task):\n        pass\n", r"^env.start returned None; it must return the task"),
        (
            RESOURCE + "class Mine(Base):\n    def __init__(self, box=per_group(sandbox)):\n        pass\n",
            r"^the resource sandbox of the prompt train.jsonl:1 could not be opened: OSError: no room \(at .*mine.py:\d+ in sandbox\)",
        ),
        (
            RESOURCE + "class Mine(Base):\n    def __init__(self, server=per_run(server)):\n        pass\n",
            r"^the resource server of the run could not be closed: OSError: gone \(at .*mine.py:\d+ in server\)",
        ),
        ("class Mine:\n    tools = ()\n", r"made a Mine, which has no start, step, close"),
        ("Mine = 3\n", r"is a int, not a function or class"),
    ],
)
def test_environments_that_break_fail_with_their_place(here, code, words):
    fails, _, _ = findings_of(here, code)
    assert len(fails) == 2 and re.search(words, fails[0]) and fails[1].startswith("test: "), fails


@pytest.mark.parametrize("wait", ["import asyncio; await asyncio.sleep(30)", "time.sleep(8)"])
def test_an_environment_that_does_not_start_in_time_fails(here, monkeypatch, wait):
    monkeypatch.setattr(play, "START_DEADLINE_S", 0.3)
    monkeypatch.setattr(boundary, "CANCEL_S", 1.0)
    fails, _, _ = findings_of(here, f"class Mine(Base):\n    async def start(self, task):\n        {wait}\n")
    assert len(fails) == 2 and re.search(r"took longer than [\d.]+ s \(at .*mine.py:\d+ in start\)", fails[0]), fails


def test_without_a_row_nothing_is_started(here):
    write_rows(here / "train.jsonl", [{"nothing": 1}])
    findings, _ = look(*AREAS)
    assert of(findings, "environment", "skip") == ["not started: needs a row to start with"]
    assert of(findings, "environment", "ok")[0] == "tools has calculator(expression)", "they are known all the same"


def test_tools_are_those_that_there_are_after_the_start(here):
    path = here / "late.py"
    path.write_text(
        ENV + """
class Late(Base):
    async def start(self, task):
        self.tools = [{"type": "function", "function": {"name": "late"}}]
        return task
"""
    )
    findings, context = look(*AREAS, overrides=[f"evaluate.sets.test.env.name={path}:Late"])
    assert [tool["function"]["name"] for tool in context.tools["test"]] == ["late"]
    assert [tool["function"]["name"] for tool in context.tools[""]] == ["calculator"]
    assert f"test: {path}:Late has late()" in of(findings, "environment", "ok")
