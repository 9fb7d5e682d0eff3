"""Errors of settings name the line of their key, and never another one."""

from __future__ import annotations

import tomllib

import pytest

from whet.config import Config, ConfigError, load_config
from whet.config.lines import MAX_LINES, lines_of

TEXT = '''# a comment with a = 1
seed = 1  # [not.a.table]
names = [
  "a = 1",  # a key in a text
  "[model]",
]
dotted."with.dot".deep = 2
text = """
[model]
seed = 3
"""

[model]
path = {file = "x", tags = [{name = "t"}]}
both.a = 1
both.b = 2

  [[sets]]
name = "first"
[sets.inside]
rate = 1
[[sets]]
name = \'\'\'
second\'\'\'
long = {only = [
  {inner = 1},
]}
'''


def test_every_key_of_one_line_has_its_line_and_no_other_has_one():
    assert lines_of(TEXT) == {
        ("seed",): 2,
        ("names",): 3,
        ("dotted",): 7,
        ("dotted", "with.dot"): 7,
        ("dotted", "with.dot", "deep"): 7,
        ("text",): 8,
        ("model",): 13,
        ("model", "path"): 14,
        ("model", "path", "file"): 14,
        ("model", "path", "tags"): 14,
        ("model", "path", "tags", 0): 14,
        ("model", "path", "tags", 0, "name"): 14,
        ("model", "both", "a"): 15,
        ("model", "both", "b"): 16,
        ("sets", 0): 18,
        ("sets", 0, "name"): 19,
        ("sets", 0, "inside"): 20,
        ("sets", 0, "inside", "rate"): 21,
        ("sets", 1): 22,
        ("sets", 1, "name"): 23,
        ("sets", 1, "long"): 25,
        ("sets", 1, "long", "only"): 25,
    }
    assert lines_of(TEXT.replace("\n", "\r\n")) == lines_of(TEXT)


def test_every_path_is_in_the_file():
    for path in lines_of(TEXT):
        node = tomllib.loads(TEXT)
        for key in path:
            node = node[key]


def test_a_line_separator_inside_a_text_ends_no_line():
    assert lines_of('a = "x\u2028y"\nb = 1\n') == {("a",): 1, ("b",): 2}


def test_a_file_with_a_very_long_value_has_no_lines():
    text = "a = [\n" + "1,\n" * MAX_LINES + "]\nb = 1\n"
    assert tomllib.loads(text)["b"] == 1 and lines_of(text) == {}


class Inner(Config):
    rate: float = 1.0
    size: int = 1


class Run(Config):
    name: str
    inner: Inner = Inner()


def refused(tmp_path, text: str, *overrides: str) -> str:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(Run, path, overrides)
    return str(caught.value).replace(str(path), "run.toml")


def test_one_problem_has_its_line_behind_the_file(tmp_path):
    assert refused(tmp_path, 'name = "a"\n\n[inner]\nrte = 2\n') == "run.toml:4: inner.rte: unknown key; did you mean inner.rate?"


def test_several_problems_have_a_line_each_and_a_missing_key_has_none(tmp_path):
    text = refused(tmp_path, '[inner]\nrate = "fast"\nsize = 1.5\n')
    assert text == (
        "run.toml: 3 problems in the configuration\n"
        "  name: is required and not set (text)\n"
        '  line 2: inner.rate = "fast": expected a number\n'
        "  line 3: inner.size = 1.5: expected an integer"
    )


@pytest.mark.parametrize("override", ["inner.rate=slow", "inner={rate='slow'}"])
def test_a_value_from_the_command_line_has_no_line_of_the_file(override, tmp_path):
    assert refused(tmp_path, 'name = "a"\n[inner]\nrate = "fast"\n', override) == 'run.toml: inner.rate = "slow": expected a number'


def test_a_table_that_the_command_line_changes_has_no_line_of_the_file(tmp_path):
    assert refused(tmp_path, 'name = "a"\n[iner]\nrate = 1\n') == "run.toml:2: iner: unknown key; did you mean inner?"
    assert refused(tmp_path, 'name = "a"\n[iner]\nrate = 1\n', "iner.size=2") == "run.toml: iner: unknown key; did you mean inner?"
