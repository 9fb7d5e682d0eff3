"""Conversations with tools in the form of ten families: what a template writes is read back, and prompts grow by what was sampled."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.data.formats.templates import FAMILIES, tokenizer_of_family
from tests.data.formats.test_formats import CALLS, TRICKY, pairs
from tests.data.formats.writing import TOOLS, WRITERS
from tests.fakes import FakeEngine
from tests.rollout.scripted import FakeEnv
from whet.data.template import Renderer
from whet.env.base import Step
from whet.env.history import THINKING_LEFT_OUT
from whet.env.limits import Limits
from whet.env.rollout import TrajectoryRun
from whet.types import Chunk, Finish, Message, Outcome, SamplingParams, Task, ToolCall

WORDS = st.text("ab é\n😀", min_size=1, max_size=8).map(str.strip).filter(bool)
EXAMPLES = 12
PHASES = (Phase.explicit, Phase.generate)


def renderer_of(name):
    return Renderer(tokenizer_of_family(name), "auto")


def spells(name, text):
    """The text with markup of the family in the middle, as the letters that it is."""
    return [f"{text}{mark}{text}" for mark in (*FAMILIES[name].added, *FAMILIES[name].special)]


@pytest.mark.parametrize("name", FAMILIES)
def test_auto_finds_the_format_of_the_template(name):
    renderer = renderer_of(name)
    assert renderer.format.name == FAMILIES[name].format and not renderer.chosen.fault
    stops = {renderer.decode([token]) for token in renderer.stop_token_ids}
    assert FAMILIES[name].eos in stops
    expected = {"llama3": {"<|eom_id|>", "<|eot_id|>"}, "harmony": {"<|call|>", "<|return|>"}, "glm45": {"<|user|>", "<|observation|>"}}
    assert expected.get(name, set()) <= stops


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=EXAMPLES, deadline=None, phases=PHASES)
@given(data=st.data())
def test_calls_that_the_template_writes_are_read_back(name, data):
    family, renderer = FAMILIES[name], renderer_of(name)
    calls = data.draw(CALLS)[: family.max_calls]
    if data.draw(st.booleans()):
        calls = [(called, {**arguments, "text": data.draw(st.sampled_from(spells(name, "a ")))}) for called, arguments in calls[:1]]
    words = data.draw(st.just("") | WORDS) if family.max_calls > 1 else ""
    thinking = data.draw(st.none() | WORDS) if family.thinks else None
    made = tuple(ToolCall(called, arguments, f"functions.{called}:{i}") for i, (called, arguments) in enumerate(calls))
    reply = Message("assistant", words, made, reasoning_content=thinking)
    tokens, mask = renderer.supervised([Message("user", "u"), reply], TOOLS)
    first = mask.index(True)
    parsed = renderer.parse(tokens[first:], TOOLS, tokens[:first])
    assert parsed.malformed == () and pairs(parsed) == calls
    assert (parsed.message.content.strip(), parsed.message.reasoning_content) == (words, thinking)
    if family.format == "kimi":
        assert [call.id for call in parsed.message.tool_calls] == [call.id for call in made]


def sampled(renderer, name, thinking, words, calls):
    """Ids of a reply as the family's models write it, its stop token included, and the reply as text."""
    family = FAMILIES[name]
    text = words
    if calls:
        text += WRITERS[family.form][0](calls).removesuffix("<|call|>")
    if family.format == "harmony":
        text = text if calls else f"<|channel|>final<|message|>{words}"
        text = f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant{text}" if thinking else text
        stop = "<|call|>" if calls else "<|return|>"
    else:
        opened = renderer.decode(renderer.prompt(Task("t", (Message("user", "u"),)))).rstrip().endswith("<think>")
        text = f"{'' if opened else '<think>'}{thinking}</think>{text}" if thinking else f"{'</think>' if opened else ''}{text}"
        stop = {"glm": "<|observation|>" if calls else "<|user|>"}.get(family.format, family.eos)
    return (*renderer.encode(text), renderer.encode(stop)[0]), text


def play(renderer, replies, steps, *, tools=TOOLS):
    """A trajectory in which the model says these ids; the ids of each request."""
    chunks = [Chunk(reply, (-1.0,) * len(reply), 0, Finish.STOP) for reply in replies]
    engine = FakeEngine(lambda request: [chunks[int(request.id.rpartition("/")[2])]])
    env = FakeEnv([*steps, Step(done=True)], tools=tools)
    sampling = SamplingParams(9000, stop_token_ids=renderer.stop_token_ids)

    async def opened():
        return env

    run = TrajectoryRun("t/0", Task("t", (Message("user", "Go."),)), engine, renderer, sampling, Limits(20, 10_000, 9000))
    return asyncio.run(run.to_end(opened)), [tuple(request.tokens) for request in engine.requests]


@st.composite
def conversations(draw, name):
    """Replies (thinking, words, calls) and what comes between them."""
    family = FAMILIES[name]
    replies, steps = [], []
    for last in [*(False for _ in range(draw(st.integers(1, 3)))), True]:
        thinking = draw(st.none() | WORDS) if family.thinks else None
        calls = [] if last else draw(st.just([]) | CALLS)[: family.max_calls]
        alone = bool(calls) and family.format in ("llama3", "harmony")
        replies.append((thinking, "" if alone else draw(WORDS), calls))
        if not last:
            texts = st.sampled_from([text for text in TRICKY if text.strip()]) | WORDS
            answers = [Message("tool", draw(texts), name=n, tool_call_id=f"functions.{n}:{i}") for i, (n, _) in enumerate(calls)]
            steps.append(Step(messages=tuple(answers) or (Message("user", draw(WORDS)),)))
    return replies, steps


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=EXAMPLES, deadline=None, phases=PHASES)
@given(data=st.data())
def test_a_prompt_begins_with_the_prompt_before_it_and_what_was_sampled(name, data):
    renderer = renderer_of(name)
    replies, steps = data.draw(conversations(name))
    ids = [sampled(renderer, name, *reply)[0] for reply in replies]
    trajectory, prompts = play(renderer, ids, steps)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    for before, reply, after in zip(prompts, ids, prompts[1:], strict=False):
        assert after[: len(before) + len(reply)] == before + reply
    assert not any(turn.restart for turn in trajectory.turns)
    for turn, (thinking, words, calls) in zip(trajectory.turns, replies, strict=True):
        assert [(call.name, dict(call.arguments)) for call in turn.message.tool_calls] == calls
        assert (turn.message.content.strip(), turn.message.reasoning_content) == (words, thinking)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.drops])
@settings(max_examples=EXAMPLES, deadline=None, phases=PHASES)
@given(data=st.data())
def test_with_strip_a_turn_without_the_thinking_before_it_begins_a_new_sample(name, data):
    renderer = renderer_of(name).stripping()
    replies, steps = data.draw(conversations(name))
    replies = [(f"T{i}T", *reply[1:]) for i, reply in enumerate(replies)]
    ids = [sampled(renderer, name, *reply)[0] for reply in replies]
    trajectory, prompts = play(renderer, ids, steps)
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    asked = [i + 1 for i, step in enumerate(steps) if step.messages[0].role == "user"]
    restarts = [i for i, turn in enumerate(trajectory.turns) if turn.restart]
    if name == "harmony":  # it drops thinking behind a final answer, and writes none of the answer itself
        asked = [i for i in asked if not replies[i - 1][2]]
    assert restarts == asked
    assert trajectory.counts.get(THINKING_LEFT_OUT, 0) == len(asked)
    for i, prompt in enumerate(prompts[1:], 1):
        text = renderer.decode(prompt)
        since = max((k for k in asked if k <= i), default=0)
        assert [f"T{k}T" in text for k in range(i)] == [k >= since for k in range(i)]
        if i not in asked:
            before = prompts[i - 1] + ids[i - 1]
            assert prompt[: len(before)] == before


@pytest.mark.parametrize("name", FAMILIES)
def test_a_malformed_call_is_answered_and_the_turn_goes_on(name):
    renderer = renderer_of(name)
    family = FAMILIES[name]
    good = WRITERS[family.form][0]([("look_up", {"text": "a"})]).removesuffix("<|call|>")
    bad = good.replace('{"text": "a"}', '{"text": ')
    for closing in ("</parameter>", "</arg_key>", "</｜DSML｜parameter>"):
        bad = bad.replace(closing, "")
    stop = {"glm": "<|observation|>", "harmony": "<|call|>"}.get(family.format, family.eos)
    prompt = renderer.prompt(Task("t", (Message("user", "u"),)), TOOLS)
    closed = "</think>" if renderer.replies.opens_thinking(prompt) else ""
    reply = (*renderer.encode(closed + bad), renderer.encode(stop)[0])
    parsed = renderer.parse(reply, TOOLS, prompt)
    assert parsed.message.tool_calls == () and len(parsed.malformed) == 1
    answer = Message("tool", f"Error: {parsed.malformed[0].text}", name="error", tool_call_id="call_0")
    text = renderer.decode(renderer.reply([answer], reply))
    assert (json.dumps(answer.content)[1:-1] in text) or (answer.content in text)
    assert stop not in text.split("Error")[0] or family.format == "harmony"


def test_a_turn_that_another_token_of_the_family_ended_is_not_closed_again():
    renderer = renderer_of("llama3")
    eom = renderer.encode("<|eom_id|>")
    text = renderer.decode(renderer.reply([Message("tool", "3")], eom))
    assert text.startswith("<|start_header_id|>ipython")
    renderer = renderer_of("harmony")
    text = renderer.decode(renderer.reply([Message("user", "b")], renderer.encode("<|return|>")))
    assert text == "<|start|>user<|message|>b<|end|><|start|>assistant"
    text = renderer.decode(renderer.reply([Message("tool", "3", name="f")], renderer.encode("<|call|>")))
    assert text == '<|start|>functions.f to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant'


def test_tags_go_on_inside_the_assistants_turn():
    renderer = renderer_of("qwen3").with_parser("tags")
    task = Task("t", (Message("user", "u"),))
    assert renderer.prompt(task, TOOLS) == renderer.prompt(task), "the template does not describe another format"
    said = renderer.encode("<look_up>a</look_up>")
    assert renderer.decode(renderer.reply([Message("tool", "Found.")], said)) == "\n\n<information>Found.</information>\n\n"
    closed = renderer.decode(renderer.reply([Message("tool", "Found.")], (*said, renderer.stop_token_ids[0])))
    assert closed == "\n<|im_start|>user\n<information>Found.</information><|im_end|>\n<|im_start|>assistant\n"


def test_thinking_stays_in_the_words_where_no_environment_answers():
    renderer = renderer_of("qwen3").with_parser("auto", answers=False)
    text = "<think>\nhm\n</think>\n\n3"
    assert renderer.parse(renderer.encode(text)).message == Message("assistant", text)
    apart = renderer_of("qwen3").parse(renderer.encode(text)).message
    assert apart == Message("assistant", "3", reasoning_content="hm")
    plain = Renderer(tokenizer_of_family("llama3"), "hermes").parse(Renderer(tokenizer_of_family("llama3")).encode(text)).message
    assert plain.content == text, "a template that knows no thinking keeps it in the words"


def test_a_call_in_thinking_that_the_prompt_opened_is_none():
    renderer = renderer_of("qwen_xml")
    prompt = renderer.prompt(Task("t", (Message("user", "u"),)), TOOLS)
    call = WRITERS["qwen_xml"][0]([("now", {})])
    inside = renderer.parse(renderer.encode(f"I could {call}"), TOOLS, prompt)
    assert (inside.message.tool_calls, inside.malformed, inside.message.content) == ((), (), "")
    behind = renderer.parse(renderer.encode(f"I could {call}</think>{call}"), TOOLS, prompt)
    assert len(behind.message.tool_calls) == 1 and behind.message.reasoning_content == f"I could {call}"


def test_a_template_of_a_foreign_format_is_refused_where_calls_are_answered():
    tokenizer = tokenizer_of_family("llama3")
    template = "{% for m in messages %}{{ m.content }}[TOOL_CALLS]{% endfor %}"
    renderer = Renderer(tokenizer, "auto", template=template)
    assert renderer.with_parser("auto", answers=False).format.name == "none"
    with pytest.raises(ValueError, match=r"\[TOOL_CALLS\].*env\.parser"):
        renderer.with_parser("auto")


def test_a_reply_is_read_the_same_after_a_text_that_ends_it():
    renderer = renderer_of("kimi")
    tokens = renderer.encode(kimi := WRITERS["kimi"][0]([("now", {})]))
    assert pairs(renderer.parse(tokens, TOOLS, stop=("never",))) == [("now", {})]
    assert renderer.parse(tokens, TOOLS, stop=(kimi[:8],)).message == replace(Message("assistant", ""))
