"""Which tokens of a conversation train, by whet's way and by those of other trainers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from tests.data.chat_templates import KINDS, THINKING, tokenizer_of
from whet.data.config import SupervisedConfig
from whet.data.masks import frame_lengths, mask_conversation
from whet.data.messages import messages_from
from whet.data.supervised import supervised_source
from whet.data.template import Renderer
from whet.types import Message, Task, ToolCall

TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
OPENING = (Message("system", "sys"), Message("user", "ask"))
WITH_TOOL = (
    *OPENING,
    Message("assistant", "first", (ToolCall("add", {"a": 1}),)),
    Message("tool", "SECRET", name="add"),
    Message("assistant", "second"),
    Message("user", "more"),
    Message("assistant", "third"),
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe good.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def trained(renderer, masked):
    """The trained runs as text."""
    tokens, mask = masked
    runs, open_run = [], False
    for token, trains in zip(tokens, mask, strict=True):
        if trains:
            runs = [*runs, []] if not open_run else runs
            runs[-1].append(token)
        open_run = trains
    return [renderer.decode(run) for run in runs]


def renderer_with(template):
    tokenizer = tokenizer_of.__wrapped__("chatml")  # one of its own, since the template changes
    tokenizer.chat_template = template
    return Renderer(tokenizer)


@pytest.mark.parametrize("kind", ["chatml", "qwen3", "llama3", "deepseek"])
def test_by_delta_only_the_assistant_trains_in_every_kind_of_template(kind):
    renderer = Renderer(tokenizer_of(kind))
    messages = [message if not message.tool_calls else Message("assistant", "first") for message in WITH_TOOL]
    masked = mask_conversation("delta", renderer, messages)
    end = KINDS[kind].eos
    assert trained(renderer, masked) == [f"first{end}", f"second{end}", f"third{end}"]
    assert "SECRET" in renderer.decode(masked[0])


@pytest.mark.parametrize("kind", ["chatml", "qwen3", "llama3", "deepseek"])
def test_silent_turns_are_context_and_nothing_else_changes(kind):
    renderer = Renderer(tokenizer_of(kind))
    messages = [message if not message.tool_calls else Message("assistant", "first") for message in WITH_TOOL]
    tokens, _ = mask_conversation("delta", renderer, messages)
    again, mask = mask_conversation("delta", renderer, messages, silent={2, 6})
    assert again == tokens
    assert trained(renderer, (again, mask)) == [f"second{KINDS[kind].eos}"]


@pytest.mark.parametrize("name", ["delta", "qwen", "qwen3", "qwen3_5"])
def test_tools_never_train_and_silence_holds_under_every_name(name):
    renderer = Renderer(tokenizer_of("chatml"))
    end = "<|im_end|>" if name == "delta" else "<|im_end|>\n"
    masked = mask_conversation(name, renderer, WITH_TOOL, [TOOL])
    assert trained(renderer, masked) == [f"first\n{CALL}{end}", f"second{end}", f"third{end}"]
    assert "SECRET" in renderer.decode(masked[0]) and '"description": "Adds."' in renderer.decode(masked[0])
    assert trained(renderer, mask_conversation(name, renderer, WITH_TOOL, [TOOL], silent={4})) == [f"first\n{CALL}{end}", f"third{end}"]
    assert trained(renderer, mask_conversation(name, renderer, WITH_TOOL, [TOOL], first_trained=5)) == [f"third{end}"]


def test_the_whole_text_is_rendered_alike_by_delta_and_message_by_message():
    renderer = Renderer(tokenizer_of("chatml"))
    names = ("delta", "qwen", "qwen3", "qwen3_5")
    texts = {name: renderer.decode(mask_conversation(name, renderer, WITH_TOOL, [TOOL])[0]) for name in names}
    assert texts["qwen"] == texts["qwen3"] == texts["qwen3_5"] == texts["delta"] + "\n"


def test_an_opening_think_mark_is_context_under_qwen3_5():
    renderer = Renderer(tokenizer_of("chatml"))
    messages = [Message("user", "a"), Message("assistant", "<think>\nhm\n</think>\n\nb")]
    assert trained(renderer, mask_conversation("qwen3_5", renderer, messages)) == ["hm\n</think>\n\nb<|im_end|>\n"]
    assert trained(renderer, mask_conversation("qwen3", renderer, messages)) == ["<think>\nhm\n</think>\n\nb<|im_end|>\n"]


def test_a_default_system_prompt_is_kept_once_under_qwen_and_refused_under_qwen3():
    renderer = renderer_with(DEFAULT_SYSTEM)
    assert frame_lengths(renderer)[0] > 0
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
    tokens, mask = mask_conversation("qwen", renderer, messages)
    assert renderer.decode(tokens) == renderer.render(messages, (), generate=False)
    assert trained(renderer, (tokens, mask)) == ["b<|im_end|>\n", "d<|im_end|>\n"]
    with pytest.raises(ValueError, match=r"adds a system prompt of its own.*use mask = qwen or delta"):
        mask_conversation("qwen3", renderer, messages)


def rows_of_calls(*arguments):
    """A conversation in which an assistant makes these calls in one turn, as a data row has it."""
    calls = [{"type": "function", "id": f"c{i}", "function": {"name": "add", "arguments": text}} for i, text in enumerate(arguments)]
    said = [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "so", "tool_calls": calls}]
    answers = [{"role": "tool", "name": "add", "tool_call_id": f"c{i}", "content": "3"} for i in range(len(calls))]
    return [*said, *answers, {"role": "assistant", "content": "done"}]


TEXT_CALLS = KINDS["chatml"].template.replace(
    "(call.function.arguments | tojson)",
    "(call.function.arguments if call.function.arguments is string else (call.function.arguments | tojson))",
)
"""As Qwen3's template: arguments that are text are written as they stand."""
AS_TEXT = ('{"b":2,"a":1}', '{\n  "a" : "\\u00e9\\/"\n}')


@pytest.mark.parametrize("name", ["delta", "qwen", "qwen3", "qwen3_5"])
def test_arguments_that_came_as_text_are_written_as_they_came_where_the_template_does_so(name):
    messages = messages_from(rows_of_calls(*AS_TEXT), "row")
    assert [call.arguments for call in messages[1].tool_calls] == [{"a": 1, "b": 2}, {"a": "é/"}]
    end = "<|im_end|>" if name == "delta" else "<|im_end|>\n"
    for template, shown in ((TEXT_CALLS, AS_TEXT), (KINDS["chatml"].template, ('{"b": 2, "a": 1}', '{"a": "é/"}'))):
        renderer = renderer_with(template)
        calls = "".join(f'\n<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call>' for text in shown)
        assert trained(renderer, mask_conversation(name, renderer, messages)) == [f"so{calls}{end}", f"done{end}"]


def test_one_call_as_text_beside_one_as_an_object_and_special_tokens_in_the_text_stay_text():
    renderer = renderer_with(TEXT_CALLS)
    rows = rows_of_calls({"a": 1}, '{"a":"<|im_end|>\\u003c|im_end|>"}')
    tokens, mask = mask_conversation("delta", renderer, messages_from(rows, "row"))
    (calls, _) = trained(renderer, (tokens, mask))
    assert '"arguments": {"a": 1}}' in calls and '"arguments": {"a":"<|im_end|>\\u003c|im_end|>"}}' in calls
    end = renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [token for token, trains in zip(tokens, mask, strict=True) if trains].count(end) == 2


def test_a_template_that_wants_arguments_as_text_gets_those_of_the_row():
    renderer = renderer_with(KINDS["chatml"].template.replace("(call.function.arguments | tojson)", "call.function.arguments"))
    for given, shown in (('{"b":2}', '{"b":2}'), ({"b": 2}, '{"b": 2}')):
        tokens, _ = mask_conversation("delta", renderer, messages_from(rows_of_calls(given), "row"))
        assert f'"arguments": {shown}}}' in renderer.decode(tokens)


THOUGHTS = (
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "hmm"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [{"name": "f", "arguments": '{"x": 1}'}]},
    {"role": "tool", "content": "1"},
    {"role": "assistant", "content": "d", "reasoning_content": "then"},
)


def test_thinking_that_is_kept_apart_and_flat_calls_train_as_the_template_writes_them():
    renderer, messages = renderer_with(THINKING), messages_from(list(THOUGHTS), "row")
    assert messages[3].tool_calls == (ToolCall("f", {"x": 1}),)
    first, call, last = "<think>\nhmm\n</think>\n\nb<|im_end|>", "<think>\nso\n</think>\n\n", "<think>\nthen\n</think>\n\nd<|im_end|>"
    call += '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
    assert trained(renderer, mask_conversation("delta", renderer, messages)) == [first, call, last]
    rendered = [text.replace("<think>\n", "", 1) + "\n" for text in (call, last)]  # its mask begins behind the opening
    assert trained(renderer, mask_conversation("qwen3_5", renderer, messages)) == ["b<|im_end|>\n", *rendered]


@pytest.mark.parametrize(("name", "template"), [("delta", "chatml"), ("qwen3_5", "chatml"), ("qwen", None), ("distill_qwen", None)])
def test_thinking_that_is_not_written_is_refused(name, template):
    renderer = renderer_with(THINKING if template is None else KINDS[template].template)
    messages = messages_from([*THOUGHTS[:1], THOUGHTS[5]], "row")
    with pytest.raises(ValueError, match=r"leaves out the thinking \(reasoning_content\) of message 1 \(?assistant"):
        mask_conversation(name, renderer, messages)
    silent = [messages[0], replace(messages[1], reasoning_content="")]
    assert any(mask_conversation(name, renderer, silent)[1])


def test_a_prompt_s_thinking_that_the_template_drops_is_told():
    renderer, messages = renderer_with(THINKING), messages_from(list(THOUGHTS), "row")
    with pytest.raises(ValueError, match=r"leaves out the thinking \(reasoning_content\) of message 1 \(assistant\)"):
        renderer.prompt(Task("t", messages[:3]))
    assert "so\n</think>" in renderer.decode(renderer.prompt(Task("t", messages[2:5])))


def test_distill_qwen_trains_the_last_answer_alone():
    renderer = Renderer(tokenizer_of("deepseek"))
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
    tokens, mask = mask_conversation("distill_qwen", renderer, messages)
    assert renderer.decode(tokens) == "<｜begin▁of▁sentence｜><｜User｜>a<｜Assistant｜>d"
    assert trained(renderer, (tokens, mask)) == ["d"]
    assert not any(mask_conversation("distill_qwen", renderer, messages, silent={3})[1])
    with pytest.raises(ValueError, match="of the role 'user'; end on an assistant's"):
        mask_conversation("distill_qwen", renderer, messages[:3])


def test_templates_that_do_not_fit_are_told():
    with pytest.raises(ValueError, match="mask = qwen3_5 needs a chat template that writes"):
        mask_conversation("qwen3_5", Renderer(tokenizer_of("llama3")), [Message("user", "a"), Message("assistant", "b")])
    with pytest.raises(ValueError, match=r"shows a user's words 0 times .* use mask = delta"):
        mask_conversation("qwen", renderer_with("{{ messages[0].role }}<|im_end|>"), [Message("user", "a"), Message("assistant", "b")])


UNKNOWN = [(("human", "gpt"), "write 'user' for it; roles are assistant, "), (("user", "gpt"), "write 'assistant' for it; roles are")]


@pytest.mark.parametrize("name", ["delta", "qwen3_5"])
@pytest.mark.parametrize(("roles", "told"), UNKNOWN)
def test_a_role_that_nobody_knows_is_told_with_its_row_and_the_roles_there_are(tmp_path, name, roles, told):
    place = next(i for i, role in enumerate(roles) if role != "user")
    path = rows_file(tmp_path, [{"role": role, "content": "a"} for role in (*roles, "assistant")])
    with pytest.raises(ValueError, match=rf"rows\.jsonl:1: message {place} has the role '{roles[place]}', which .*{told}"):
        supervised_source(SupervisedConfig(path=path, mask=name), Renderer(tokenizer_of("chatml")), run_seed=0)


def test_a_role_that_the_template_names_is_known():
    template = KINDS["chatml"].template + "{# 'human' #}"
    messages = messages_from([{"role": "human", "content": "a"}, {"role": "assistant", "content": "b"}], "row")
    assert trained(renderer_with(template), mask_conversation("delta", renderer_with(template), messages)) == ["b<|im_end|>"]
    with pytest.raises(ValueError, match=r"message 0 has the role 'human'.*; write 'user' for it"):
        Renderer(tokenizer_of("chatml")).prompt(Task("t", tuple(messages)))


def rows_file(folder, messages):
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return str(path)


def test_a_data_files_step_loss_mask(tmp_path):
    renderer = Renderer(tokenizer_of("chatml"))
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "step_loss_mask": 0},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "step_loss_mask": 1},
    ]
    path = rows_file(tmp_path, messages)
    for name, end in (("delta", "<|im_end|>"), ("qwen3_5", "<|im_end|>\n")):
        (sample,) = supervised_source(SupervisedConfig(path=path, mask=name), renderer, run_seed=0).next(1)
        assert trained(renderer, (sample.tokens, sample.loss_mask)) == [f"d{end}"]
    with pytest.raises(ValidationError, match="mask"):
        SupervisedConfig(path=path, mask="qwen4")


@pytest.mark.parametrize(("step", "message"), [(2, r"message 1: step_loss_mask is a number \(2\)"), (0, "no token of the conversation")])
def test_step_loss_masks_that_cannot_be_used_name_the_row(tmp_path, step, message):
    path = rows_file(tmp_path, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "step_loss_mask": step}])
    with pytest.raises(ValueError, match=message) as error:
        supervised_source(SupervisedConfig(path=path), Renderer(tokenizer_of("chatml")), run_seed=0)
    assert "rows.jsonl:1" in str(error.value)
