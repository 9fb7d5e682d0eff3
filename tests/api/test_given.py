"""Keyword arguments as settings: nested keys, rows of several kinds, functions that a worker can or cannot import."""

import json
from pathlib import Path

import pytest

from tests.api.small import ROWS, score
from whet.api.given import importable, read_given
from whet.api.rows import rows_text
from whet.config import ConfigError, resolve
from whet.here import digest, holding, is_here


def test_parts_of_a_key_are_tables():
    settings = {"train__optim__eps": 2.0, "train": {"compile": True}, "seed": 3, "rollout__stop": ("a",)}
    given = read_given({"train": {"optim": {"lr": 1.0}}, "algo": None}, settings)
    assert given.in_folder(Path("runs/x")) == {
        "train": {"optim": {"lr": 1.0, "eps": 2.0}, "compile": True}, "seed": 3, "rollout": {"stop": ["a"]}, "run_dir": "runs/x"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"train": {"optim": {"lr": 1}}, "train__optim__lr": 2}, "train__optim__lr is given twice: 1 and 2"),
        ({"train": 3, "train__optim__lr": 2}, "train is 3, not a table"),
        ({"run_dir": 3}, "run_dir = 3: expected the path of a folder"),
        ({"run_dir": ""}, 'run_dir = "": expected the path of a folder'),
        ({"train.optim.lr": 2}, "between them: train__optim__lr"),
        ({"train__": 2}, "write the parts of a key with __ between them"),
    ],
)
def test_a_key_that_is_given_twice_is_told(settings, told):
    with pytest.raises(ConfigError, match=told):
        read_given({}, settings)


def test_no_run_folder_is_as_if_it_was_left_out():
    assert read_given({}, {"run_dir": None, "seed": 3}).tree == {"seed": 3}


def test_the_callers_dictionaries_stay_what_they_are():
    table = {"optim": {"lr": 1.0}}
    read_given({}, {"train": table, "train__optim__eps": 2.0})
    assert table == {"optim": {"lr": 1.0}}


def test_functions_are_named_so_that_they_are_found_again():
    def inner(trajectory):
        return 0.0

    other, second = (lambda t: 1.0), (lambda t: 2.0)
    parts = {"a": score, "b": inner, "c": other, "d": second}
    given = read_given({}, {"reward": {"components": {name: {"name": function} for name, function in parts.items()}}})
    names = [part["name"] for part in given.tree["reward"]["components"].values()]
    assert names == ["tests.api.small:score", "whet.here:inner", "whet.here:lambda", "whet.here:lambda_2"]
    with holding(given.functions):
        assert [resolve(name) for name in names] == [score, inner, other, second]
        with pytest.raises(ValueError, match="another run works in this Python process"), holding({}):
            pass
    with pytest.raises(ConfigError, match="is a function of the Python process that started the run"):
        resolve("whet.here:inner")


def test_what_a_worker_cannot_import_is_here():
    code = compile("def late(t): return 1", "<cell>", "exec")
    space = {"__name__": "__main__"}
    exec(code, space)
    assert importable(space["late"]) is None and importable(print) is None and importable(lambda t: 1) is None
    assert importable(score) == "tests.api.small:score"
    assert is_here("whet.here:late") and not is_here("whet.hero:late")


def test_a_functions_digest_changes_with_what_it_does_and_with_nothing_else():
    def made(limit, text="return t > limit"):
        space = {}
        exec(compile(f"def make(limit):\n    def f(t):\n        {text}\n    return f", "<cell>", "exec"), space)
        return space["make"](limit)

    def of(function):
        with holding({"f": function}):
            return digest("whet.here:f")

    assert of(made(3)) == of(made(3)) and of(made(3)) != of(made(4)) != of(made(4, "return t < limit"))


FRAMES = ["pandas", "polars"]


@pytest.mark.parametrize("package", FRAMES)
def test_frames_are_rows(package):
    frames = pytest.importorskip(package)
    text = rows_text(frames.DataFrame({"prompt": ["a", "b"], "label": [1.5, float("nan")], "n": [1, 2]}), "data")
    first, second = (json.loads(line) for line in text.splitlines())
    assert (first, second) == ({"prompt": "a", "label": 1.5, "n": 1}, {"prompt": "b", "label": None, "n": 2})


def test_whole_numbers_of_a_frame_some_of_which_are_missing_stay_whole():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame([{"label": 2, "x": 1.5, "y": 3.0}, {"label": None, "x": None, "y": 4.0}])
    rows = [json.loads(line) for line in rows_text(frame, "data").splitlines()]
    assert [repr(row) for row in rows] == ["{'label': 2, 'x': 1.5, 'y': 3.0}", "{'label': None, 'x': None, 'y': 4.0}"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^run_dir: .*file/run cannot be written: Not a directory; choose another with run_dir=PATH"):
        read_given({"data": {"train": ROWS}}, {}).write_rows(tmp_path / "file/run")


class Dataset:
    """A data set as `datasets` has it, as far as it is looked at."""

    column_names = ("prompt",)

    def __iter__(self):
        return iter(ROWS)


def test_data_sets_are_rows_and_a_split_is_to_be_chosen():
    assert rows_text(Dataset(), "data").count("\n") == len(ROWS)
    with pytest.raises(ValueError, match="choose one of 'train', 'test'"):
        rows_text({"train": Dataset(), "test": Dataset()}, "data")


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "data has no rows"),
        (["a", 3], "row 1 is a str, expected a dictionary"),
        ({"prompt": "a"}, "is a dictionary, expected a list of rows"),
        (7, "data: 7 is no rows; expected a list"),
        ([{"prompt": "a", "image": b"x"}], "row 1, column 'image' holds a bytes, which JSON has not"),
    ],
)
def test_what_is_no_rows_is_told(data, told):
    with pytest.raises(ValueError, match=told):
        rows_text(data, "data")
