"""Tool-call formats against real tokenizers and templates, and against the package renderers (`make test-agents`)."""

from __future__ import annotations

import json
import subprocess

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.agents.families import REAL, agents_folder, model_folder, real_tokenizer
from tests.data.formats.test_formats import CALLS, pairs
from tests.data.formats.writing import TOOLS, WRITERS
from whet.data.template import Renderer
from whet.types import Message, Task, ToolCall

pytestmark = pytest.mark.agents
PHASES = (Phase.explicit, Phase.generate)
ASKED = Task("t", (Message("user", "How many?"),))
RENDERERS: dict[str, Renderer] = {}
KINDLY = [[("look_up", {"text": "naïve \"a\"\n\\n 日本", "count": -3, "items": [], "options": {"a": [1, {"b": None}]}})]]
"""Calls for the oracle. It refuses `True`, which Qwen3.5's template writes for true."""
PARALLEL = [[("look_up", {"text": "007"}), ("now", {})]]


def renderer_of(name):
    if name not in RENDERERS:
        RENDERERS[name] = Renderer(real_tokenizer(name), "auto").with_parser("auto")
    return RENDERERS[name]


@pytest.mark.parametrize("name", REAL)
def test_auto_finds_the_format_and_its_stops(name):
    renderer = renderer_of(name)
    assert renderer.format.name == REAL[name].format
    stops = {renderer.decode([token]) for token in renderer.stop_token_ids}
    assert {text for text in renderer.format.stops if text in real_tokenizer(name).get_vocab()} | {REAL[name].eos} <= stops


def written(name, calls):
    """Prompt and reply with these calls, as the template writes them, or as the family's models do."""
    family, renderer = REAL[name], renderer_of(name)
    made = tuple(ToolCall(called, arguments, f"functions.{called}:{i}") for i, (called, arguments) in enumerate(calls))
    try:
        tokens, mask = renderer.supervised([*ASKED.prompt, Message("assistant", "", made)], TOOLS)
        first = mask.index(True)
        return tokens[:first], tokens[first:]
    except ValueError:  # its history is written otherwise than it generates
        prompt = renderer.prompt(ASKED, TOOLS)
        closed = "</think>" if renderer.replies.opens_thinking(prompt) else ""
        text = closed + WRITERS[family.form][0](calls).removesuffix("<|call|>")
        stop = {"harmony": "<|call|>", "glm": "<|observation|>"}.get(family.format, family.eos)
        return prompt, (*renderer.encode(text), *renderer.encode(stop))


@pytest.mark.parametrize("name", REAL)
@settings(max_examples=15, deadline=None, phases=PHASES)
@given(data=st.data())
def test_calls_that_the_template_writes_are_read_back(name, data):
    calls = data.draw(CALLS)[: REAL[name].max_calls]
    prompt, reply = written(name, calls)
    parsed = renderer_of(name).parse(reply, TOOLS, prompt)
    assert parsed.malformed == () and pairs(parsed) == calls


@pytest.mark.parametrize("name", REAL)
def test_the_next_prompt_begins_with_what_was_sampled_and_shows_the_answers(name):
    renderer = renderer_of(name)
    calls = PARALLEL[0][: REAL[name].max_calls]
    prompt, reply = written(name, calls)
    answers = [Message("tool", f"answer {i}", name=n, tool_call_id=f"functions.{n}:{i}") for i, (n, _) in enumerate(calls)]
    context = renderer.reply(answers, reply)
    text = renderer.decode(context)
    assert all(answer.content in text for answer in answers)
    again = renderer.reply([Message("user", "And then?")], (*renderer.encode("So."), renderer.stop_token_ids[0]))
    assert "And then?" in renderer.decode(again)
    whole = renderer.decode((*prompt, *reply, *context))
    assert whole.startswith(renderer.decode(prompt)) and whole.endswith(text)


@pytest.fixture(scope="module")
def oracle():
    python = agents_folder() / "formats/bin/python"
    with subprocess.Popen(
        [str(python), "-m", "tests.agents.renderers_oracle"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


def ask(oracle, **question):
    oracle.stdin.write(json.dumps(question) + "\n")
    oracle.stdin.flush()
    line = oracle.stdout.readline()
    assert line, "the oracle ended; its error is above"
    return json.loads(line)


@pytest.mark.parametrize("name", [name for name, family in REAL.items() if family.oracle])
@pytest.mark.parametrize("calls", [*KINDLY, *PARALLEL], ids=["one", "parallel"])
def test_renderers_reads_the_same_and_goes_on_with_the_same_tokens(oracle, name, calls):
    renderer, calls = renderer_of(name), calls[: REAL[name].max_calls]
    prompt, reply = written(name, calls)
    answers = [Message("tool", f"answer {i}", name=n, tool_call_id=f"functions.{n}:{i}") for i, (n, _) in enumerate(calls)]
    found = ask(
        oracle,
        renderer=REAL[name].oracle,
        folder=str(model_folder(name)),
        prompt=list(prompt),
        reply=list(reply),
        tools=[tool["function"] if REAL[name].oracle == "DeepSeekV4Renderer" else tool for tool in TOOLS],
        messages=[answer.to_dict() for answer in answers],
    )
    assert [(called, arguments) for called, arguments in found["calls"]] == pairs(renderer.parse(reply, TOOLS, prompt)) == calls
    if name == "deepseek-v4" and len(calls) > 1:  # it does not go on from several answers
        assert found["next"] is None
        return
    assert found["next"] is not None
    ours = (*prompt, *reply, *renderer.reply(answers, reply))
    assert renderer.decode(found["next"]) == renderer.decode(ours)
    assert tuple(found["next"]) == ours
