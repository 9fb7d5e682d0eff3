"""Import references: what they find, and what they say when they do not."""

from __future__ import annotations

import math
import sys

import pytest
from pydantic import ValidationError

from whet.config import Config, ConfigError, Reference, resolve


@pytest.fixture(autouse=True)
def keep_imports(monkeypatch, tmp_path):
    """Imports from a test's folder leave no trace in the next test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_module_and_a_dotted_name():
    assert resolve("math:sqrt") is math.sqrt
    assert resolve("collections.abc:Mapping.get").__name__ == "get"


def test_a_module_of_the_current_directory(tmp_path):
    (tmp_path / "my_rewards_here.py").write_text("def score(): return 7\n")
    assert resolve("my_rewards_here:score")() == 7


def test_a_file_is_loaded_once_and_may_import_its_neighbours(tmp_path):
    folder = tmp_path / "deep"
    folder.mkdir()
    (folder / "neighbour_of_it.py").write_text("VALUE = 3\n")
    (folder / "user.py").write_text(
        "from dataclasses import dataclass\nfrom neighbour_of_it import VALUE\n"
        "@dataclass\nclass Box:\n    value: 'int' = VALUE\n"
    )
    box = resolve("deep/user.py:Box")
    assert box().value == 3
    assert resolve(f"{folder}/user.py:Box") is box


def test_files_of_one_name_do_not_collide(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text(f"WHERE = {folder!r}\n")
    assert [resolve(f"{folder}/same.py:WHERE") for folder in ("one", "two")] == ["one", "two"]


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("math:sqr", ["reward 'math:sqr': math has no 'sqr'", "did you mean sqrt"]),
        ("collections.abc:Mapping.gett", ["collections.abc:Mapping has no 'gett'", "did you mean get"]),
        ("no_such_module_x:f", ["no module named 'no_such_module_x'", "module:name"]),
        ("math.nothing:f", ["'math.nothing'"]),
        ("no/such.py:f", ["there is no file", "no/such.py"]),
        ("broken_user.py:f", ["fails to import: ZeroDivisionError: division by zero", "broken_user.py:2)"]),
        ("broken_user:f", ["fails to import: ZeroDivisionError: division by zero", "broken_user.py:2)"]),
        ("needs_other.py:f", ["fails to import: ModuleNotFoundError: No module named 'no_such_dependency'"]),
        ("needs_other:f", ["fails to import: ModuleNotFoundError: No module named 'no_such_dependency'"]),
        ("bad_syntax.py:f", ["fails to import: SyntaxError", "bad_syntax.py:1"]),
    ],
)
def test_errors_say_what_failed(tmp_path, reference, parts):
    (tmp_path / "broken_user.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "needs_other.py").write_text("import no_such_dependency\n")
    (tmp_path / "bad_syntax.py").write_text("def f(:\n")
    for _ in range(2):  # a failed import is not remembered as a success
        with pytest.raises(ConfigError) as error:
            resolve(reference, kind="reward")
        assert all(part in str(error.value) for part in parts), str(error.value)


class Holder(Config):
    reward: Reference


@pytest.mark.parametrize("text", ["score", "my module:score", "module:", ":name", "a/b:name", "module:1x", "a..b:c"])
def test_the_form_is_checked_without_importing(text):
    with pytest.raises(ValidationError, match=r"is not an import reference: write module:name"):
        Holder(reward=text)
    with pytest.raises(ConfigError, match="is not an import reference"):
        resolve(text)


@pytest.mark.parametrize("text", ["not_imported_yet:score", "dir/file.py:Class.method"])
def test_a_good_form_is_kept_as_it_stands(text):
    assert Holder(reward=text).reward == text
