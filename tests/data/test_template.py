"""The chat template by delta: the ids of a conversation grow turn by turn into what the template would render whole."""

from __future__ import annotations

import json
import pickle
import re
from copy import deepcopy
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tests.data.chat_templates import KINDS, tokenizer_of
from tests.data.tokenizer_kinds import MAKERS, TEMPLATES, tokenizer_like
from whet.data.config import ChatConfig
from whet.data.formats.plain import NONE
from whet.data.template import MARK, Renderer, load_renderer, load_tokenizer
from whet.data.turns import left_out
from whet.types import Message, Task, ToolCall

WHOLE = ["chatml", "llama3", "deepseek", "llama2", "chatml_base"]
"""Templates that never rewrite a turn, and so agree with the delta to the letter."""
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
PLAIN_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="<>\u2063"), min_size=1, max_size=12).filter(
    lambda text: text == text.strip()
)


def full_render(renderer, messages, generate, tools=()):
    return renderer.tokenizer.apply_chat_template(
        [m.to_dict() for m in messages],
        tokenize=False,
        add_generation_prompt=generate,
        **({"tools": list(tools)} if tools else {}),
    )


def stop_of(renderer):
    return renderer.decode(renderer.stop_token_ids[:1])


def play(renderer, messages, tools=()):
    """The ids of a rollout in which the model samples the assistants' contents, and which of them it sampled."""
    first = next(i for i, m in enumerate(messages) if m.role == "assistant")
    ids = list(renderer.prompt(Task("t", tuple(messages[:first])), tools))
    sampled = [False] * len(ids)
    waiting: list[Message] = []
    last: tuple[int, ...] = ()
    for message in messages[first:]:
        if message.role != "assistant":
            waiting.append(message)
            continue
        if last:
            context = renderer.reply(waiting, last)
            ids += context
            sampled += [False] * len(context)
        last = (*renderer.encode(message.content), renderer.stop_token_ids[0])
        ids += last
        sampled += [True] * len(last)
        waiting = []
    return ids, sampled, waiting, last


@st.composite
def conversations(draw, kind):
    messages = []
    if KINDS[kind].system_role and draw(st.booleans()):
        messages.append(Message("system", draw(PLAIN_TEXT)))
    messages.append(Message("user", draw(PLAIN_TEXT)))
    for _ in range(draw(st.integers(1, 4))):
        messages.append(Message("assistant", draw(PLAIN_TEXT)))
        if KINDS[kind].tool_role and draw(st.booleans()):
            messages += [Message("tool", draw(PLAIN_TEXT), name="add") for _ in range(draw(st.integers(1, 3)))]
        else:
            messages.append(Message("user", draw(PLAIN_TEXT)))
    return messages


@pytest.mark.parametrize("kind", WHOLE)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_turns_add_up_to_the_whole_template(kind, data):
    renderer = Renderer(tokenizer_of(kind))
    messages = data.draw(conversations(kind))
    if kind == "llama2":  # its model samples the space before the text, which the prompt does not end with
        messages = [replace(m, content=f" {m.content} ") if m.role == "assistant" else m for m in messages]
        shown = [replace(m, content=m.content.strip(" ")) if m.role == "assistant" else m for m in messages]
    else:
        shown = messages
    ids, _, waiting, last = play(renderer, messages)
    ids += renderer.reply(waiting, last)
    assert renderer.decode(ids) == full_render(renderer, shown, generate=True)


@pytest.mark.parametrize("kind", [*WHOLE, "qwen3", "plain"])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_supervised_row_has_the_ids_of_a_rollout_that_says_the_same(kind, data):
    renderer = Renderer(tokenizer_of(kind))
    messages = data.draw(conversations(kind))
    sampled_text = messages
    if kind == "llama2":
        sampled_text = [replace(m, content=f" {m.content} ") if m.role == "assistant" else m for m in messages]
    ids, sampled, _, _ = play(renderer, sampled_text)
    tokens, mask = renderer.supervised(messages)
    assert (list(tokens), list(mask)) == (ids, sampled)


def test_tool_calls_are_said_as_the_template_writes_them():
    renderer = Renderer(tokenizer_of("chatml"))
    call = Message("assistant", "so", (ToolCall("add", {"a": 1, "b": 2}),))
    messages = [Message("user", "1+2?"), call, Message("tool", "3"), Message("assistant", "It is 3.")]
    tokens, mask = renderer.supervised(messages, [TOOL])
    trained = renderer.decode([t for t, m in zip(tokens, mask, strict=True) if m])
    said = 'so\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    assert trained == said + "It is 3.<|im_end|>"
    assert renderer.decode(tokens) == full_render(renderer, messages, False, [TOOL]).removesuffix("\n")
    # What was said, read again, is the same call: rows and rollouts speak one language.
    again = renderer.parse(renderer.encode(said)).message
    assert (again.content, [(c.name, c.arguments) for c in again.tool_calls]) == ("so", [("add", {"a": 1, "b": 2})])


def test_only_what_comes_after_first_trained_trains():
    renderer = Renderer(tokenizer_of("chatml"))
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")]
    everything, _ = renderer.supervised(messages)
    tokens, mask = renderer.supervised(messages, first_trained=3)
    assert tokens == everything
    assert renderer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == "d<|im_end|>"


def test_history_keeps_the_thinking_that_the_template_would_drop():
    renderer = Renderer(tokenizer_of("qwen3"))
    thought = "<think>\nhm\n</think>\n\n"
    messages = [
        Message("user", "a"),
        Message("assistant", thought + "b"),
        Message("user", "c"),
        Message("assistant", thought + "d"),
    ]
    assert full_render(renderer, messages, False).count("hm") == 1  # the template does rewrite
    tokens, mask = renderer.supervised(messages)
    assert renderer.decode(tokens).count(thought) == 2
    ids, sampled, _, _ = play(renderer, messages)
    assert (list(tokens), list(mask)) == (ids, sampled)


def test_template_options_reach_the_generation_prompt_of_every_turn():
    renderer = Renderer(tokenizer_of("chatml"), template_options={"enable_thinking": False})
    opening = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert renderer.decode(renderer.prompt(Task("t", (Message("user", "a"),)))).endswith(opening)
    assert renderer.decode(renderer.reply([Message("user", "b")], renderer.stop_token_ids)).endswith(opening)
    with pytest.raises(ValueError, match=r"message 1 \(assistant\) after its own generation prompt.*enable_thinking"):
        renderer.supervised([Message("user", "a"), Message("assistant", "b")])


def test_replies_of_several_tools_are_grouped():
    renderer = Renderer(tokenizer_of("chatml"))
    text = renderer.decode(renderer.reply([Message("tool", "1"), Message("tool", "2")], renderer.stop_token_ids))
    first, second = (f"\n<tool_response>\n{n}\n</tool_response>" for n in "12")
    assert text == f"\n<|im_start|>user{first}{second}<|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_is_closed_exactly_once():
    renderer = Renderer(tokenizer_of("chatml_base"))
    tokenizer = renderer.tokenizer
    im_end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    # A base model's eos is not what its chat template closes a turn with: both end a turn.
    assert renderer.stop_token_ids == (im_end, eos)
    message = [Message("user", "b")]
    rest = "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    said = renderer.encode("a")
    assert renderer.decode(renderer.reply(message, (*said, im_end))) == rest
    assert renderer.decode(renderer.reply(message, (*said, eos))) == "<|im_end|>" + rest
    assert renderer.decode(renderer.reply(message, said)) == "<|im_end|>" + rest


@pytest.mark.parametrize("kind", ["chatml", "llama3", "deepseek", "llama2"])
def test_instruct_models_stop_at_their_eos_alone(kind):
    renderer = Renderer(tokenizer_of(kind))
    assert renderer.stop_token_ids == (renderer.tokenizer.eos_token_id,)


def test_a_template_that_closes_with_text_still_trains_a_stop_token():
    renderer = Renderer(tokenizer_of("plain"))
    tokens, mask = renderer.supervised([Message("user", "a"), Message("assistant", "b")])
    assert renderer.decode(tokens) == "user: a\nassistant: b<|endoftext|>"
    assert renderer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == "b<|endoftext|>"


def test_an_empty_reply_is_a_stop_token():
    renderer = Renderer(tokenizer_of("chatml"))
    tokens, mask = renderer.supervised([Message("user", "a"), Message("assistant", "")])
    assert [t for t, m in zip(tokens, mask, strict=True) if m] == list(renderer.stop_token_ids)


def test_text_that_quotes_the_stop_token_is_kept_whole():
    renderer = Renderer(tokenizer_of("chatml"))
    tokens, mask = renderer.supervised([Message("user", "a"), Message("assistant", "b<|im_end|>c")])
    assert renderer.decode([t for t, m in zip(tokens, mask, strict=True) if m]) == "b<|im_end|>c<|im_end|>"


def test_a_message_that_quotes_the_mark_is_not_cut():
    renderer = Renderer(tokenizer_of("chatml"))
    text = renderer.decode(renderer.reply([Message("tool", f"a{MARK}b")], renderer.stop_token_ids))
    assert f"a{MARK}b" in text and text.startswith("\n<|im_start|>user")


def test_plain_prompts_need_no_template_and_get_nothing_added():
    renderer = Renderer(tokenizer_of("none"))
    assert renderer.stop_token_ids == (renderer.tokenizer.eos_token_id,)
    prompt = renderer.prompt(Task("t", "  2+2= "))
    assert prompt == renderer.encode("  2+2= ") and renderer.decode(prompt) == "  2+2= "
    with pytest.raises(ValueError, match=r"no chat template.*data\.chat=false"):
        renderer.prompt(Task("t", (Message("user", "a"),)))


def test_a_row_s_tool_of_the_environment_s_name_is_listed_once():
    renderer = Renderer(tokenizer_of("chatml"))
    other = {"type": "function", "function": {"name": "sub", "description": "", "parameters": {"type": "object"}}}
    task = Task("t", (Message("user", "a"),), tools=(TOOL, other))
    text = renderer.decode(renderer.prompt(task, [TOOL]))
    assert text.count('"add"') == 1 and text.count('"sub"') == 1


def test_a_template_that_rejects_a_role_says_which():
    renderer = Renderer(tokenizer_of("llama2"))
    with pytest.raises(ValueError, match=r"cannot render the roles \['system', 'user'\].*must alternate"):
        renderer.prompt(Task("t", (Message("system", "s"), Message("user", "u"))))
    with pytest.raises(ValueError, match=r"'tool', 'tool'.*must alternate"):
        renderer.supervised(
            [Message("user", "u"), Message("assistant", "a"), Message("tool", "t"), Message("tool", "t"), Message("assistant", "b")]
        )


@pytest.mark.parametrize(
    ("roles", "what"),
    [(["user"], "has no assistant's message"), (["assistant", "user", "assistant"], "starts with an assistant's message")],
)
def test_a_conversation_without_a_reply_to_a_prompt_is_refused(roles, what):
    with pytest.raises(ValueError, match=f"{what}.*{roles[0]}"):
        Renderer(tokenizer_of("chatml")).supervised([Message(role, "x") for role in roles])


def test_parsing_leaves_the_stop_token_out():
    renderer = Renderer(tokenizer_of("chatml"), NONE)
    stop = renderer.stop_token_ids[0]
    assert renderer.parse((*renderer.encode("a"), stop)).message == Message("assistant", "a")
    assert renderer.parse((*renderer.encode("a"), stop, stop)).message.content == "a<|im_end|>"
    assert renderer.parse(()).message.content == ""


def test_a_tokenizer_without_eos_is_refused():
    tokenizer = tokenizer_of("chatml").__class__(tokenizer_object=tokenizer_of("chatml").backend_tokenizer)
    with pytest.raises(ValueError, match=r"no eos_token.*tokenizer_config\.json"):
        Renderer(tokenizer)


def test_loading_says_what_a_folder_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"model\.path.*no tokenizer\.json"):
        load_tokenizer(tmp_path)
    for content in ("{", "[]", "{}", '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=r"model\.path: the tokenizer of .* cannot be loaded: \w+: .*; copy the model's own"):
            load_tokenizer(tmp_path)
    tokenizer_of("chatml").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("<|im_end|>a") == tokenizer_of("chatml").encode("<|im_end|>a")


def shape(folder, vocab_size):
    """A folder's config.json, without weights: loading a tokenizer reads no more."""
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": vocab_size}))


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(tmp_path):
    tokenizer = deepcopy(tokenizer_of("chatml"))
    tokenizer.save_pretrained(tmp_path)
    highest = max(tokenizer.get_vocab().values())
    for size in (highest + 1, highest + 500):  # rounded up, as many models' are
        shape(tmp_path, size)
        assert load_tokenizer(tmp_path).get_vocab() == tokenizer.get_vocab()
    shape(tmp_path, highest)
    words = rf"model\.path: .* has 1 tokens that its model does not have, among them '</tool_call>' \({highest}\): .* {highest},"
    with pytest.raises(ValueError, match=words):
        load_tokenizer(tmp_path)
    shape(tmp_path, 100)
    with pytest.raises(ValueError, match=rf"has {highest - 99} tokens .* so its ids end at 99\. Copy the model's own"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_count_but_padding_and_placeholders_do_not(tmp_path, special):
    tokenizer = deepcopy(tokenizer_of("chatml"))
    size = max(tokenizer.get_vocab().values()) + 1
    shape(tmp_path, size)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["extra_special_tokens"] = {"image_token": "<image_soft_token>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    loaded = load_tokenizer(tmp_path)
    assert {loaded.get_vocab()[text] for text in ("<pad>", "<image_soft_token>")} == {size, size + 1}
    loaded.add_tokens([AddedToken("<think>", special=special)], special_tokens=special)
    loaded.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"has 1 tokens that its model does not have, among them '<think>' \({size + 2}\)"):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_language_model_is_left_to_loading_it(tmp_path):
    tokenizer_of("chatml").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert load_tokenizer(tmp_path).eos_token == "<|im_end|>"


def gemma():
    """As Gemma 4's template: tools' answers are written behind calls alone, and calls end with a token of their own."""
    return """\
{%- for m in messages %}{% if m.role == 'assistant' %}\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>model
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}\
</tool_call>{% endfor %}{% if m.tool_calls %}{% for t in messages[loop.index0 + 1:] if t.role == 'tool' %}\
<|eot_id|>{{ t.name }}:{{ t.content }}{% endfor %}{% if loop.last %}<|eot_id|>{% endif %}{% else %}<|im_end|>
{% endif %}{% elif m.role != 'tool' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}\
{%- if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>model
{% endif %}"""


def other(template, *added):
    tokenizer = deepcopy(tokenizer_of("chatml"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    tokenizer.chat_template = template
    return Renderer(tokenizer)


def test_answers_that_a_template_writes_behind_calls_alone_are_written_there():
    renderer = other(gemma(), "<|eot_id|>")
    assert [renderer.decode([t]) for t in renderer.stop_token_ids] == ["<|im_end|>", "<|eot_id|>"]
    eot = renderer.stop_token_ids[1]
    answers = [Message("tool", "42", name="add", tool_call_id="c"), Message("tool", "43", name="sub", tool_call_id="d")]
    said = (*renderer.encode("<tool_call>add{}</tool_call>"), eot)
    assert renderer.decode(renderer.reply(answers, said)) == "add:42<|eot_id|>sub:43"
    assert renderer.decode(renderer.reply(answers, said[:-1])) == "<|eot_id|>add:42<|eot_id|>sub:43"
    assert (
        renderer.decode(renderer.reply([Message("user", "u")], renderer.stop_token_ids[:1]))
        == "\n<|im_start|>user\nu<|im_end|>\n<|im_start|>model\n"
    )
    call = Message("assistant", "", (ToolCall("add", {"a": 1}, "c"),))
    tokens, mask = renderer.supervised([Message("user", "u"), call, answers[0], Message("assistant", "so")])
    trained = renderer.decode([t for t, m in zip(tokens, mask, strict=True) if m])
    assert trained == '<tool_call>add{"a": 1}</tool_call><|eot_id|>so<|im_end|>'


def test_what_a_template_leaves_out_is_refused():
    written = "{% for m in messages if m.role in ROLES %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    written += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = other(written.replace("ROLES", "['user', 'assistant']"))
    words = "leaves out the words of message {} \\({}\\)"
    with pytest.raises(ValueError, match=words.format(2, "tool")):
        renderer.reply([Message("tool", "42")], renderer.stop_token_ids)
    with pytest.raises(ValueError, match=words.format(2, "tool")):
        renderer.check_answers(["add"])
    with pytest.raises(ValueError, match=words.format(0, "system")):
        renderer.prompt(Task("t", (Message("system", "s"), Message("user", "u"))))
    called = (Message("user", "u"), Message("assistant", "a", (ToolCall("f", {"x": 1}),)), Message("user", "v"))
    with pytest.raises(ValueError, match=r"leaves out call 0 of message 1 \(assistant\).*data\.template"):
        renderer.prompt(Task("t", called))
    with pytest.raises(ValueError, match=r"leaves out call 0 of message 1"):
        renderer.supervised(called[:2])
    assert renderer.prompt(Task("t", (Message("user", "u"),)))


ONE_CALL = "{{ m.tool_calls[0].function if m.tool_calls else m.content }}"
NO_CALL = "{% if not m.tool_calls %}{{ m.content }}{% endif %}"


@pytest.mark.parametrize("template", [ONE_CALL, NO_CALL])
def test_a_second_call_and_words_beside_a_call_are_not_left_out_in_silence(template):
    head = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role != 'assistant' %}{{ m.content }}{% else %}"
    tail = "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = other(head + template + tail)
    calls = (ToolCall("f", {"x": 1}), ToolCall("g", {"x": 2}))
    with pytest.raises(ValueError, match=r"leaves out call .* of message 1 \(assistant\)"):
        renderer.supervised([Message("user", "u"), Message("assistant", "", calls)])
    with pytest.raises(ValueError, match=r"leaves out .*the words of message 1 \(assistant\)"):
        renderer.supervised([Message("user", "u"), Message("assistant", "so", calls[:1])])


def test_what_is_remembered_of_a_long_conversation_is_short():
    renderer = Renderer(tokenizer_of("chatml"))
    for num_turns in (300, 301):
        renderer.prompt(Task("t", (Message("user", "u"), Message("assistant", "a")) * num_turns))
    with pytest.raises(ValueError, match="leaves out the words") as error:
        template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}{# 'ROLE' #}".replace("ROLE", "r" * 5000)
        other(template).prompt(Task("t", (Message("r" * 5000, "u"),)))
    assert len(str(error.value).partition(" of a conversation")[0]) < 200
    forms = renderer._template._forms
    assert len(forms) > 1 and len(pickle.dumps(forms)) < 100 * len(forms)


def test_a_template_that_wants_arguments_as_text_gets_them():
    write = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    head = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + write + "<|im_end|>\n{% endfor %}"
    renderer = other(head + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    tokens, _ = renderer.supervised([Message("user", "u"), Message("assistant", "so ", (ToolCall("f", {"x": "é"}),))])
    assert renderer.decode(tokens).endswith('so f{"x": "é"}<|im_end|>')


def glm():
    """As GLM-4.5's template: nothing closes a turn."""
    return """\
{%- for m in messages %}{% if m.role == 'tool' %}<|observation|>
{% else %}<|{{ m.role }}|>
{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}\
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


def test_what_begins_the_next_turn_ends_one_that_nothing_closes():
    renderer = other(glm(), "<|user|>", "<|observation|>", "<|assistant|>")
    assert [renderer.decode([t]) for t in renderer.stop_token_ids] == ["<|user|>", "<|observation|>", "<|im_end|>"]
    user, observation, eos = renderer.stop_token_ids
    assert renderer.decode(renderer.reply([Message("user", "v")], (user,))) == "\nv<|assistant|>\n"
    assert renderer.decode(renderer.reply([Message("tool", "v")], (observation,))) == "\nv<|assistant|>\n"
    assert renderer.decode(renderer.reply([Message("tool", "v")], (eos,))) == "<|observation|>\nv<|assistant|>\n"
    call = Message("assistant", "", (ToolCall("f", {}),))
    tokens, mask = renderer.supervised([Message("user", "u"), call, Message("tool", "t"), Message("assistant", "so")])
    trained = renderer.decode([t for t, m in zip(tokens, mask, strict=True) if m])
    assert trained == '<tool_call>{"name": "f", "arguments": {}}</tool_call><|observation|>so<|user|>'
    assert renderer.parse((*renderer.encode("so"), user)).message.content == "so"


def test_a_model_s_own_generation_settings_end_turns_too(tmp_path):
    tokenizer_of("chatml").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0, 65]}')
    renderer = load_renderer(tmp_path, ChatConfig())
    assert renderer.stop_token_ids == (2, 0)  # 65 is a letter
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"generation_config\.json cannot be read"):
        load_renderer(tmp_path, ChatConfig())


def test_a_template_of_one_s_own_and_its_variables(tmp_path):
    tokenizer_of("chatml").save_pretrained(tmp_path)
    own = "{{ greeting }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (tmp_path / "own.jinja").write_text(own)
    for template in (own, str(tmp_path / "own.jinja")):
        renderer = load_renderer(tmp_path, ChatConfig(template=template, template_kwargs={"greeting": "hi"}))
        assert renderer.decode(renderer.prompt(Task("t", (Message("user", "u"),)))) == "hi<|im_start|>u<|im_end|>"
    for wrong, hint in (("greting", "; did you mean 'greeting'"), ("bogus", ": leave it out")):
        with pytest.raises(ValueError, match=rf"^data\.template_kwargs: the chat template has no variable '{wrong}'{re.escape(hint)}"):
            load_renderer(tmp_path, ChatConfig(template=own, template_kwargs={wrong: False}))
    with pytest.raises(ValueError, match=r"chat template nowhere\.jinja cannot be read"):
        load_renderer(tmp_path, ChatConfig(template="nowhere.jinja"))


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("kind", MAKERS)
def test_text_is_tokenised_as_the_model_will_meet_it(kind, family):
    """Turn by turn, a conversation has the ids of its whole text: no space is put before a turn."""
    tokenizer = tokenizer_like(kind, family)
    renderer = Renderer(tokenizer)
    messages = [
        Message(role, text)
        for role, text in zip(("user", "assistant") * 2, ("hello there", "the answer", "how many", "world"), strict=True)
    ]
    tokens, mask = renderer.supervised(messages)
    whole = tokenizer.apply_chat_template([m.to_dict() for m in messages], tokenize=False).rstrip()
    assert list(tokens) == tokenizer.encode(whole, add_special_tokens=False)
    # A rollout that samples the same meets the same.
    said = [[t for t, m in run] for trained, run in groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1]) if trained]
    chain = [*renderer.prompt(Task("t", (messages[0],))), *said[0]]
    assert [*chain, *renderer.reply([messages[2]], said[0]), *said[1]] == list(tokens)


def test_what_a_template_leaves_out_is_found_in_time_that_grows_with_the_conversation():
    """A client of the server may send tens of thousands of calls, which would hold up everybody's texts."""

    class Looked(str):
        characters = 0

        def find(self, part, start=0):
            at = str.find(self, part, start)
            Looked.characters += (len(self) if at < 0 else at + len(part)) - start
            return at

        def __contains__(self, part):
            Looked.characters += len(self)
            return str.__contains__(self, part)

    def apply(messages, tools, generate):
        out = []
        for message in messages:
            calls = [json.dumps(call["function"]) for call in message.get("tool_calls", ())]
            out += [f"<{message['role']}>", message["content"], *calls]
        return Looked("\n".join(out))

    calls = tuple(ToolCall("f", {"a": 1}, f"c{i}") for i in range(1000))
    turns = [Message("user", "u"), Message("assistant", "a", calls)] * 3
    short = [Message("user", "u"), Message("assistant", "a", calls[:1])] * 1000
    for messages in (turns, short):
        Looked.characters = 0
        assert left_out(apply, messages, (), 0) == ""
        assert Looked.characters < 4 * len(apply([m.to_dict() for m in messages], (), False)) + 1_000_000
    silent = Message("assistant", "a", calls)
    told = left_out(lambda messages, tools, generate: " ".join(m["content"] for m in messages), [Message("user", "u"), silent], (), 0)
    assert told == "call 0 and call 1 and call 2 of message 1 (assistant)"
