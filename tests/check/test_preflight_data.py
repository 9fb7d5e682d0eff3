"""The data as the run reads them, and what is shown of them."""

import json
from pathlib import Path

import pytest

from tests.check.small_run import look, module, of, write_rows
from whet.build.process import quiet_transformers
from whet.check import data, faults
from whet.check.faults import visible
from whet.data.config import SupervisedConfig
from whet.data.source import TaskSource
from whet.data.supervised import supervised_source
from whet.data.template import Renderer, load_tokenizer
from whet.settings.rl import evaluation_rows, training_rows

quiet_transformers()
AREAS = ("model", "tokenizer", "environment", "data", "evaluation")


def renderer_of(folder):
    return Renderer(load_tokenizer(folder / "model"))


def test_rows_are_those_of_the_runs_own_source(here):
    rows = [{"prompt": "short " * n, "label": str(n), "extra": n} for n in range(1, 30)]
    write_rows(here / "train.jsonl", rows)
    findings, context = look(*AREAS, overrides=["data.max_prompt_tokens=80", "rollout.max_tokens=90"])
    renderer, tools = renderer_of(here), context.tools[""]
    source = TaskSource(training_rows(context.rl), length=lambda task: len(renderer.prompt(task, tools)))
    lengths = [len(renderer.prompt(task, tools)) for task in source.tasks]
    assert 0 < source.num_dropped < len(rows)
    counted, room, *_ = of(findings, "data", "ok")
    dropped = f"{source.num_dropped} dropped as longer than max_prompt_tokens = 80"
    assert counted == f"{len(source)} rows of train.jsonl, columns prompt, label, extra, {dropped}"
    left = f"rollout.max_tokens = 90 leaves {90 - max(lengths)} or more"
    assert room.startswith(f"prompts have {min(lengths)} to {max(lengths)} tokens; {left}")
    assert context.source.tasks == source.tasks


def test_the_first_prompts_are_shown_as_the_model_sees_them(here):
    findings, context = look(*AREAS)
    task = context.source.tasks[0]
    text = renderer_of(here).decode(renderer_of(here).prompt(task, context.tools[""]))
    first = of(findings, "data", "ok")[2]
    assert first.splitlines() == [
        f"train.jsonl:1: {len(renderer_of(here).prompt(task, context.tools['']))} tokens, label '0'",
        "prompt  " + text.replace("\n", "\u21b5"),
        "model   begins here",
    ]
    assert "calculator(expression)" in first and first.count("What is 0 + 0?") == 1


def test_every_bad_row_is_told_up_to_a_number(here):
    write_rows(here / "train.jsonl", [{"label": "1"}] * 3 + [{"prompt": ""}] * 4 + [{"prompt": "x", "label": "1"}])
    texts = of(look(*AREAS)[0], "data", "FAIL")
    assert len(texts) == faults.SHOWN_FAULTS + 1 and texts[-1] == "2 further rows are wrong"
    assert texts[0].startswith("train.jsonl:1: there is no column 'prompt'")
    assert texts[4].startswith("train.jsonl:5: column 'prompt' is empty")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train=gone.jsonl"], "there is no data file or folder gone.jsonl"),
        (["data.prompt_key=question"], "there is no column 'question' (prompt_key); the columns are prompt, label"),
        (["data.label_key=answer"], "train.jsonl: there is no column 'answer' (label_key)"),
        (["data.max_prompt_tokens=3"], "every prompt of train.jsonl is longer than max_prompt_tokens = 3"),
    ],
)
def test_data_that_cannot_be_read_as_configured_fail(here, overrides, words):
    findings, context = look(*AREAS, overrides=overrides)
    assert words in of(findings, "data", "FAIL")[0]
    assert context.source is None and "" not in context.rows


def test_prompts_without_room_are_counted_and_fail_where_all_are(here):
    write_rows(here / "train.jsonl", [{"prompt": "word " * n, "label": "1"} for n in (1, 40, 90)])
    context = look(*AREAS, overrides=["rollout.max_tokens=400"])[1]
    lengths = sorted(len(renderer_of(here).prompt(task, context.tools[""])) for task in context.source.tasks)
    for limit, status, count in [(lengths[2] + 1, "ok", 0), (lengths[2], "warn", 1), (lengths[0] + 1, "warn", 2), (lengths[0], "FAIL", 3)]:
        findings, _ = look(*AREAS, overrides=[f"rollout.max_tokens={limit}"])
        found = [f for f in findings if f.area == "data" and "rollout.max_tokens" in f.text]
        assert [f.status for f in found] == [status], limit
        assert count == 0 or f"leaves no room to reply to {count} of 3" in found[0].text


def test_prompts_that_the_template_cannot_render_fail_with_their_places(here):
    path = here / "model/chat_template.jinja"
    refusal = "{%- if messages[0].content is eq('What is 0 + 1?') %}{{ raise_exception('no such question') }}{%- endif %}"
    path.write_text(refusal + path.read_text())
    findings, context = look(*AREAS)
    assert of(findings, "data", "FAIL")[0].startswith("train.jsonl:2:") and "no such question" in of(findings, "data", "FAIL")[0]
    assert context.source is not None
    findings, _ = look(*AREAS, overrides=["data.max_prompt_tokens=500"])
    assert of(findings, "data", "FAIL")[0].startswith("train.jsonl:2:"), "the run stops there, too"


def test_prompts_that_end_with_a_reply_are_worth_a_look(here):
    asked = {"role": "user", "content": "1 + 1?"}
    rows = [{"prompt": [asked], "label": "2"}, {"prompt": [asked, {"role": "assistant", "content": "2"}], "label": "2"}]
    write_rows(here / "train.jsonl", rows)
    (told,) = of(look(*AREAS)[0], "data", "warn")
    assert told.startswith("1 of 2 prompts end with a message of the assistant's (train.jsonl:2), and the model begins another after it")


def test_roles_that_nobody_knows_are_told_with_their_row(here):
    rows = [{"prompt": [{"role": role, "content": "1 + 1?"}], "label": "2"} for role in ("user", "critic", "critic")]
    write_rows(here / "train.jsonl", rows)
    (told,) = of(look(*AREAS)[0], "data", "FAIL")
    assert told.startswith("train.jsonl:2: message 0 has the role 'critic', which neither") and "roles are assistant, developer, " in told
    rows[2]["prompt"][0]["role"] = "human"
    write_rows(here / "train.jsonl", rows)
    (failed, *_) = of(look(*AREAS)[0], "data", "FAIL")
    assert failed.startswith("train.jsonl:3: message 0 has the role 'human'") and "write 'user' for it" in failed


def test_rows_are_read_even_if_they_cannot_be_rendered(here):
    findings, context = look("data")
    assert of(findings, "data") == ["12 rows of train.jsonl, columns prompt, label", "not checked: needs the tokenizer"]
    assert len(context.source) == 12
    findings, context = look("data", overrides=["data.max_prompt_tokens=60"])
    assert context.source is None, "how many rows there will be is not known without their lengths"
    findings, _ = look("model", "tokenizer", "data")
    assert of(findings, "data")[-1] == "not checked: needs the environment's tools"


def test_evaluation_sets_are_read_with_their_own_rows_limits_and_sampling(here):
    write_rows(here / "other.jsonl", [{"question": f"q {i}", "label": "1"} for i in range(5)])
    overrides = [
        "evaluate.sets.other.path=other.jsonl", "evaluate.sets.other.rows.prompt_key=question", "evaluate.sets.other.limit=3",
        "evaluate.sets.other.rollout.max_tokens=77", "evaluate.sets.bad.path=gone.jsonl",
    ]  # fmt: skip
    findings, context = look(*AREAS, overrides=overrides)
    texts = of(findings, "evaluation", "ok")
    assert texts[0].startswith("test: 3 rows of test.jsonl, columns prompt, label; 2 of them are played, 1 time each")
    assert [text for text in texts if text.startswith("other: 5 rows") and "3 of them are played" in text]
    assert [text for text in texts if text.startswith("other: prompts have") and "rollout.max_tokens = 77" in text]
    assert of(findings, "evaluation", "FAIL")[0].startswith("bad: there is no data file")
    chosen = context.rl.evaluate.sets["other"]
    assert context.rows["other"] == TaskSource(evaluation_rows(context.rl, chosen), name="other").tasks[:3]
    assert len(context.rows["test"]) == 2 and "bad" not in context.rows


def test_a_run_without_evaluation_sets_is_told(here):
    (here / "run.toml").write_text((here / "run.toml").read_text().replace(', sets = { test = { path = "test.jsonl", limit = 2 } }', ""))
    assert "no evaluation set" in of(look(*AREAS)[0], "evaluation", "warn")[0]


def test_a_best_checkpoint_by_what_no_set_measures_fails_beside_sound_sets(here):
    findings, _ = look(*AREAS, overrides=["checkpoint.best=eval/tset/reward/total"])
    (fault,) = of(findings, "evaluation", "FAIL")
    assert "checkpoint.best is 'eval/tset/reward/total'" in fault and "eval/test/..." in fault
    assert of(findings, "evaluation", "ok")
    assert of(look(*AREAS, overrides=["checkpoint.best=eval/test/reward/total"])[0], "evaluation", "FAIL") == []


def test_an_evaluation_set_with_an_environment_of_its_own_is_rendered_with_its_tools(here):
    reference = module(here, "tools.py", 'def ask(question: str) -> str:\n    """Ask."""\n    return question\n')
    findings, _ = look(*AREAS, overrides=["evaluate.sets.test.env.name=tools", f"evaluate.sets.test.env.tools=['{reference}:ask']"])
    shown = [text for text in of(findings, "evaluation", "ok") if "begins here" in text]
    assert len(shown) == 2 and all("ask(question)" in text and "calculator" not in text for text in shown)


def test_conversations_are_counted_and_shown_with_what_trains(here):
    talks = [[("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")], [("user", "long " * 99), ("assistant", "c")]]
    write_rows(here / "talk.jsonl", [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks])
    findings, context = look("model", "tokenizer", "data", file="sft.toml", overrides=["data.max_tokens=60"])
    source = supervised_source(SupervisedConfig(path="talk.jsonl", max_tokens=60), renderer_of(here), run_seed=0)
    ((tokens, mask),) = source.rows()
    counted, rows, shown = of(findings, "data", "ok")
    assert counted == "2 rows of talk.jsonl, columns messages"
    assert f"1 conversations have {len(tokens)} to {len(tokens)} tokens, 1 dropped as longer than data.max_tokens = 60" in rows
    assert f"{sum(mask)} of {len(tokens)} tokens train" in rows
    lines = shown.splitlines()
    assert [line[:8] for line in lines[1:]] == ["context ", "TRAINS  ", "context ", "TRAINS  "]
    assert [line[8:] for line in lines if line.startswith("TRAINS")] == ["a<|im_end|>", "b<|im_end|>"]
    assert "".join(line[8:] for line in lines[1:]) == renderer_of(here).decode(tokens).replace("\n", "\u21b5")
    assert context.longest == (len(tokens),)


def test_conversations_that_cannot_be_parsed_or_rendered_fail_with_their_places(here):
    said = {"role": "assistant", "content": "a"}
    write_rows(here / "talk.jsonl", [{"messages": [said]}, {"messages": [{"role": "user", "content": "q"}, said]}, {"messages": [said]}])
    findings, _ = look("model", "tokenizer", "data", file="sft.toml")
    assert [text.split(":")[1] for text in of(findings, "data", "FAIL")] == ["1", "3"]
    write_rows(here / "talk.jsonl", [{"messages": []}, {"other": 1}])
    findings, _ = look("model", "tokenizer", "data", file="sft.toml")
    assert [text.split(":")[1] for text in of(findings, "data", "FAIL")] == ["1", "2"]
    findings, _ = look("data", file="sft.toml", overrides=["data.path=gone.jsonl"])
    assert "there is no data file" in of(findings, "data", "FAIL")[0]


def test_conversations_that_are_all_too_long_fail(here):
    findings, _ = look("model", "tokenizer", "data", file="sft.toml", overrides=["data.max_tokens=3"])
    assert "every conversation of source 'train' is longer than max_tokens = 3" in of(findings, "data", "FAIL")[0]


def test_conversations_are_parsed_without_a_tokenizer(here):
    assert of(look("data", file="sft.toml")[0], "data") == ["12 rows of talk.jsonl, columns messages", "not checked: needs the tokenizer"]


def test_of_many_rows_some_are_measured_and_that_is_said(here, monkeypatch):
    monkeypatch.setattr(data, "MEASURED_ROWS", 5)
    assert of(look(*AREAS)[0], "data", "ok")[1].startswith("4 prompts at even distances have")


def test_long_texts_lose_their_middle():
    assert visible("a\nb") == "a\u21b5b"
    text = visible("x" * 500 + "END")
    assert text.startswith("xxx") and text.endswith("END") and " [...] " in text and len(text) == faults.SHOWN_CHARS + len(" [...] ")


def test_parquet_and_folders_are_counted_like_lines(here):
    folder = Path("rows")
    folder.mkdir()
    (folder / "a.json").write_text(json.dumps([{"prompt": "p", "label": "1"}] * 3))
    assert of(look(*AREAS, overrides=["data.train=rows"])[0], "data", "ok")[0] == "3 rows of rows, columns prompt, label"
