"""Preference rows: their forms, what trains, what is refused, and a cursor that continues."""

import json

import pytest

from tests.data.chat_templates import tokenizer_of
from whet.data.config import PreferenceConfig
from whet.data.preference import preference_source
from whet.data.template import Renderer


@pytest.fixture(scope="module")
def renderer():
    return Renderer(tokenizer_of("chatml"))


def write(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def talk(*texts):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def source_of(tmp_path, renderer, rows, **options):
    return preference_source(PreferenceConfig(path=write(tmp_path, rows), **options), renderer, run_seed=0)


def said(renderer, sample):
    return renderer.decode([t for t, m in zip(sample.tokens, sample.loss_mask, strict=True) if m])


FORMS = {
    "conversations": ({"chosen": talk("q", "good"), "rejected": talk("q", "bad")}, {}),
    "text": ({"prompt": "q", "chosen": "good", "rejected": "bad"}, {"prompt_key": "prompt"}),
    "messages": ({"prompt": talk("q"), "chosen": talk("q", "good")[1:], "rejected": talk("q", "bad")[1:]}, {"prompt_key": "prompt"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_one_pair_gives_the_same_tokens(tmp_path, renderer, form):
    row, options = FORMS[form]
    (pair,) = source_of(tmp_path, renderer, [row], **options).next(1)
    assert (said(renderer, pair.chosen), said(renderer, pair.rejected)) == ("good<|im_end|>", "bad<|im_end|>")
    assert renderer.decode(pair.chosen.tokens) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\ngood<|im_end|>"
    assert (pair.chosen.group, pair.rejected.group, pair.margin) == ("train/0#0", "train/0#0", 0.0)
    assert (pair.chosen.trajectory, pair.rejected.trajectory) == ("train/0#0/chosen", "train/0#0/rejected")


def test_what_both_begin_with_is_context_and_later_turns_train(tmp_path, renderer):
    row = {"chosen": talk("a", "shared", "b", "one", "c", "two"), "rejected": talk("a", "shared", "b", "three")}
    (pair,) = source_of(tmp_path, renderer, [row]).next(1)
    assert said(renderer, pair.chosen) == "one<|im_end|>two<|im_end|>"
    assert said(renderer, pair.rejected) == "three<|im_end|>"


def test_margins_come_from_their_column(tmp_path, renderer):
    rows = [{"prompt": "q", "chosen": "g", "rejected": "b", "gap": gap} for gap in (0, 1.5)]
    source = source_of(tmp_path, renderer, rows, prompt_key="prompt", margin_key="gap", shuffle=False)
    assert [pair.margin for pair in source.next(2)] == [0.0, 1.5]


def test_equal_replies_and_long_pairs_are_left_out_and_counted(tmp_path, renderer):
    rows = [{"prompt": "q", "chosen": c, "rejected": r} for c, r in (("a", "b"), ("a", "a"), ("a", "b" * 50))]
    source = source_of(tmp_path, renderer, rows, prompt_key="prompt", max_tokens=30)
    assert (len(source), source.num_same, source.num_dropped) == (1, 1, 1)
    tie = [*rows, {"chosen": talk("q", "same"), "rejected": talk("q", "same")}]
    assert source_of(tmp_path, renderer, [{"chosen": talk("q", "x"), "rejected": talk("q", "y")}, tie[-1]]).num_same == 1


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"chosen": talk("q", "a"), "rejected": talk("p", "b")}, {}, "rows.jsonl:1: 'chosen' and 'rejected' begin with different messages"),
        ({"chosen": talk("q", "a"), "rejected": talk("q")}, {}, "rows.jsonl:1: column 'rejected' has nothing after the shared prompt of 1"),
        ({"chosen": talk("q", "a", "b"), "rejected": talk("q", "a", "c")}, {}, "has a message of the role 'user' after the shared"),
        ({"chosen": "a", "rejected": "b"}, {}, "rows.jsonl:1: column 'chosen' holds text, but there is no prompt to it"),
        ({"prompt": "q", "chosen": "a"}, {"prompt_key": "prompt"}, "rows.jsonl:1: there is no column 'rejected'"),
        ({"prompt": "q", "chosen": 3, "rejected": "b"}, {"prompt_key": "prompt"}, "rows.jsonl:1: column 'chosen' holds a number (3)"),
        ({**FORMS["text"][0], "m": -1}, {"prompt_key": "prompt", "margin_key": "m"}, "holds a number (-1), expected a number of at"),
        ({**FORMS["text"][0], "m": True}, {"prompt_key": "prompt", "margin_key": "m"}, "rows.jsonl:1: column 'm'"),
        ({**FORMS["text"][0], "rejected": "good"}, {"prompt_key": "prompt"}, "both replies are the same"),
        (FORMS["text"][0], {"prompt_key": "prompt", "max_tokens": 5}, "has a conversation longer than max_tokens = 5"),
        (FORMS["text"][0], {"prompt_key": "prompt", "tools_key": "tool"}, "there is no column 'tool'"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path, renderer, row, options, words):
    with pytest.raises(ValueError) as error:
        source_of(tmp_path, renderer, [row], **options)
    assert words in str(error.value)


def test_the_cursor_goes_on_where_it_was_and_refuses_other_pairs(tmp_path, renderer):
    rows = [{"prompt": "q", "chosen": f"a{i}", "rejected": "b"} for i in range(5)]
    first, again = (source_of(tmp_path, renderer, rows, prompt_key="prompt") for _ in range(2))
    first.next(3)
    again.restore(json.loads(json.dumps(first.state())))
    assert first.next(7) == again.next(7)
    rows[4]["rejected"] = "c"
    other = source_of(tmp_path, renderer, rows, prompt_key="prompt")
    with pytest.raises(ValueError, match="over other rows"):
        other.restore(first.state())
    assert [pair.chosen.group for pair in other.all()] == [f"train/{i}#0" for i in range(5)]
