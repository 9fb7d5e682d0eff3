"""The chat template by delta: the ids of a conversation grow turn by turn into what the template would render whole."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace

import pytest
from chat_templates import KINDS, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from whet.data.parsers import parse_none
from whet.data.template import MARK, Renderer, load_tokenizer
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
    renderer = Renderer(tokenizer_of("chatml"), parse_none)
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
