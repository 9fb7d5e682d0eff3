"""Errors of data files."""

from __future__ import annotations

import json

import pyarrow as pa
from pyarrow import parquet

from tests.errors.error_bench import Bench, Case, Told, together

GOOD = '{"prompt": "What is 2+3?", "label": "5"}\n'


def second_row(bench: Bench, row: str, *more: str) -> Told:
    """A file whose second line is `row`."""
    return of_file(bench, "my.jsonl", GOOD + row + "\n", *more)


def of_file(bench: Bench, name: str, content: str | bytes, *more: str) -> Told:
    bench.file(name, content)
    return bench.refused(f"data.train={name}", *more)


def missing_file(bench: Bench) -> Told:
    return bench.refused("data.train=trian.jsonl")


def malformed_line(bench: Bench) -> Told:
    return second_row(bench, '{"prompt": "What is 4+4?" "label": "8"}')


def no_json_number(bench: Bench) -> Told:
    return together(
        second_row(bench, '{"prompt": "What is 4+4?", "label": NaN}'),
        second_row(bench, '{"prompt": "What is 4+4?", "label": 1e999}'),
        second_row(bench, '{"prompt": "What is 4+4?", "label": ' + "8" * 5000 + "}"),
    )


def key_twice(bench: Bench) -> Told:
    return second_row(bench, '{"prompt": "What is 4+4?", "label": "8", "label": "9"}')


def nested_too_deeply(bench: Bench) -> Told:
    return second_row(bench, '{"prompt": ' + "[" * 50_000 + "]" * 50_000 + "}")


def not_text(bench: Bench) -> Told:
    latin = of_file(bench, "latin.jsonl", GOOD.encode() + '{"prompt": "Où est Paris?", "label": "1"}\n'.encode("latin-1"))
    half = second_row(bench, json.dumps({"prompt": "What is this: \ud83d", "label": "8"}))
    return together(latin, half)


def missing_column(bench: Bench) -> Told:
    first = of_file(bench, "my.jsonl", '{"question": "What is 2+3?", "answer": "5"}\n')
    return together(first, bench.refused("data.label_key=labels"), bench.refused("data.prompt_template={question}?"))


def unknown_role(bench: Bench) -> Told:
    def row(role: str) -> str:
        return json.dumps({"prompt": [{"role": role, "content": "What is 4+4?"}], "label": "8"}) + "\n"

    usual = "".join(map(row, ("user", "developer", "tool")))
    bench.file("test.jsonl", row("human"))
    test = bench.refused("evaluate.sets.test.path=test.jsonl")
    return together(*(of_file(bench, "my.jsonl", usual + row(role)) for role in ("usr", "human")), test)


def wrong_type(bench: Bench) -> Told:
    return together(
        second_row(bench, '{"prompt": 4, "label": "8"}'),
        second_row(bench, '{"prompt": "What is 4+4?", "label": ["8"]}'),
        second_row(bench, '{"prompt": [{"role": "user"}], "label": "8"}'),
    )


def empty(bench: Bench) -> Told:
    return together(of_file(bench, "empty.jsonl", ""), bench.refused("data.train=train.jsonl@[9:]"))


def all_too_long(bench: Bench) -> Told:
    return bench.refused("data.max_prompt_tokens=5")


def no_room(bench: Bench) -> Told:
    return bench.refused("rollout.max_tokens=12", "num_rollouts=2")


def some_too_long(bench: Bench) -> Told:
    rows = [json.loads(GOOD), {"prompt": "What is " + "1+" * 200 + "1?", "label": "201"}]
    name = bench.file("my.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return bench.goes_on(f"data.train={name}", failed={"refused": 4})


def no_label(bench: Bench) -> Told:
    content = '{"prompt": "What is 2+3?"}\n{"prompt": "What is 4+4?"}\n'
    return of_file(bench, "my.jsonl", content, "reward.name=math", "run_dir=runs/other")


def damaged_parquet(bench: Bench) -> Told:
    path = bench.folder / "my.parquet"
    parquet.write_table(pa.Table.from_pylist([json.loads(GOOD)] * 100), path)
    path.write_bytes(path.read_bytes()[:-100])
    return bench.refused("data.train=my.parquet")


DATA = (
    Case(
        id="missing-file",
        title="A data file that is not there",
        cause="The path is misspelt, or relative to another folder than the current one.",
        remedy="Correct `data.train`; names that are near are suggested.",
        words=("there is no data file or folder trian.jsonl", "did you mean train.jsonl?"),
        provoke=missing_file,
        seen_by_check=True,
    ),
    Case(
        id="malformed-line",
        title="A line that is not JSON",
        cause="A jsonl file has one JSON object per line, and this line is none.",
        remedy="Correct the line; the message has its number, the column, and the text around it.",
        words=("my.jsonl:2: not valid JSON at column 27", "Expecting ',' delimiter"),
        provoke=malformed_line,
        seen_by_check=True,
    ),
    Case(
        id="no-json-number",
        title="NaN, infinity and numbers without measure",
        cause="JSON has neither NaN nor infinity, and a number that no float holds would silently become one.",
        remedy="Write `null` where there is no value, and text where every digit counts.",
        words=("my.jsonl:2: NaN is no JSON value; write null", "1e999 is too large", "has 5000 digits"),
        provoke=no_json_number,
        seen_by_check=True,
    ),
    Case(
        id="key-twice",
        title="A key twice in one object",
        cause="Only one of the two values could be kept, and nothing tells which one is meant.",
        remedy="Remove the other from the row.",
        words=("my.jsonl:2", "the key 'label' occurs 2 times"),
        provoke=key_twice,
        seen_by_check=True,
    ),
    Case(
        id="nested-too-deeply",
        title="JSON that is nested too deeply",
        cause="A row holds thousands of lists or objects within each other.",
        remedy="Look at what wrote the row; a prompt is text or a list of messages.",
        words=("my.jsonl:2", "nested too deeply"),
        provoke=nested_too_deeply,
        seen_by_check=True,
    ),
    Case(
        id="not-text",
        title="Bytes that are not text",
        cause="Files are UTF-8, with or without a byte order mark, with lines that end as Unix or Windows ends them. An escape such as "
        "`\\ud83d` is half of a character.",
        remedy="Convert the file (`iconv -f latin1 -t utf-8`), or repair what cuts texts in the middle of a character.",
        words=("latin.jsonl:2: not UTF-8 text (byte 13)", "my.jsonl:2", "half of a surrogate pair"),
        provoke=not_text,
        seen_by_check=True,
    ),
    Case(
        id="missing-column",
        title="A column that is not there",
        cause="The columns are named otherwise than the settings say: `data.prompt_key` (default `prompt`), `data.label_key` (default "
        "`label`), or the names in `data.prompt_template`.",
        remedy="Name the column that there is, for example `data.prompt_key=question`.",
        words=("my.jsonl:1: there is no column 'prompt' (prompt_key); the columns are question, answer", "did you mean 'label'?"),
        provoke=missing_column,
        seen_by_check=True,
    ),
    Case(
        id="unknown-role",
        title="A role that nobody knows",
        cause="A message of a prompt has a role that neither chat formats nor the model's chat template know: most templates would write it "
        "as it is, and some would leave the message out.",
        remedy="Write one of the roles that the message lists. A role that the chat template names (`data.template`) is one, too.",
        words=("my.jsonl:4: message 0 has the role 'usr'", "write 'user' for it", "test.jsonl:1: message 0 has the role 'human'", "developer"),
        provoke=unknown_role,
        seen_by_check=True,
    ),
    Case(
        id="column-type",
        title="A column that holds something else",
        cause="A prompt is text or a list of messages with role and content, a label is text or a number.",
        remedy="Correct the row, or name another column.",
        words=("my.jsonl:2: column 'prompt' holds a number (4)", "column 'label' holds a list (['8'])", "message 0 has no content"),
        provoke=wrong_type,
        seen_by_check=True,
    ),
    Case(
        id="no-rows",
        title="Data without rows",
        cause="The file is empty, or a slice (`file@[a:b]`) lies behind its end.",
        remedy="Give other data.",
        words=("there are no rows in empty.jsonl", "there are no rows in train.jsonl@[9:]"),
        provoke=empty,
        seen_by_check=True,
    ),
    Case(
        id="all-prompts-too-long",
        title="Every prompt is too long",
        cause="`data.max_prompt_tokens` drops the longer prompts, and none is left.",
        remedy="Raise it; the message says how long the prompts are.",
        words=("every prompt of train.jsonl is longer than max_prompt_tokens = 5: they have",),
        provoke=all_too_long,
        seen_by_check=True,
    ),
    Case(
        id="no-room",
        title="No prompt leaves room to answer",
        cause="`rollout.max_tokens` counts the prompt as well as the replies, and the prompts alone are longer.",
        remedy="Raise `rollout.max_tokens`.",
        words=("all 8 trajectories failed", "8 in limits: PromptTooLong", "rollout.max_tokens = 12; raise it"),
        provoke=no_room,
        seen_by_check=True,
        check_words=("rollout.max_tokens = 12 leaves no room to reply to 4 of 4: raise it",),
        mend=lambda bench: ("num_rollouts=2",),
    ),
    Case(
        id="some-too-long",
        title="Some prompts leave no room to answer",
        cause="These trajectories are refused and counted (`outcome/refused`); the others train.",
        remedy="Nothing, if they are few. Else raise `rollout.max_tokens`, or drop them beforehand with `data.max_prompt_tokens`.",
        words=("trajectory train/1#0/0 failed in limits: PromptTooLong", "rollout.max_tokens = 256", "data.max_prompt_tokens"),
        provoke=some_too_long,
        status=0,
        seen_by_check=False,  # no fault: check warns
    ),
    Case(
        id="no-label",
        title="A row without the label that its reward needs",
        cause="The rewards that come with whet read every row before anything is sampled: labels, and what they want of `metadata`. A row without "
        "a label would be scored 0 for ever, and one that cannot be read would end the run when it is played.",
        remedy="Add or correct the label, name its column with `data.label_key`, or use a reward that needs none.",
        words=("train/0#0", "my.jsonl:1", "it is missing"),
        provoke=no_label,
        seen_by_check=True,
        check_words=("my.jsonl:1", "it is missing"),
    ),
    Case(
        id="damaged-parquet",
        title="A parquet file that is damaged",
        cause="The file was cut short, as by a download that broke off, or is of another format.",
        remedy="Copy or download it again.",
        words=("my.parquet is not a parquet file, or is damaged", "again"),
        provoke=damaged_parquet,
        seen_by_check=True,
    ),
)
