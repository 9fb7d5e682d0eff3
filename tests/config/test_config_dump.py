"""What is written as TOML is read back as it was."""

from __future__ import annotations

import tomllib
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from whet.config import Config, config_hash, dump_toml, load_config

# Surrogates are no characters: neither UTF-8 nor TOML has them.
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
FLOATS = st.floats(allow_nan=False)


class Colour(Enum):
    RED = "red"


class Leaf(Config):
    text: str = ""
    number: float = 0.0
    note: str | None = "default"
    plain_note: str | None = None


class Branch(Config):
    before: Leaf = Leaf(plain_note="given")
    count: int = 1
    names: dict[str, str] = Field(default_factory=dict)
    leaves: dict[str, Leaf] = Field(default_factory=lambda: {"a": Leaf(text="preset")})
    stack: list[Leaf] = Field(default_factory=list)
    pairs: tuple[tuple[int, str], ...] = ()
    maybe: Leaf | None = None
    free: dict[str, Any] = Field(default_factory=dict)


class Root(Config):
    path: Path = Path("a/b")
    colour: Colour = Colour.RED
    flag: bool = False
    branch: Branch = Branch()
    tags: frozenset[str] = frozenset()


def reload(config: Config, folder: Path) -> Config:
    path = folder / "dumped.toml"
    path.write_text(dump_toml(config), newline="")
    return load_config(type(config), path)


NOTES = st.none() | TEXT.filter(lambda text: text not in ("none", "null"))
LEAVES = st.builds(Leaf, text=TEXT, number=FLOATS, note=NOTES, plain_note=NOTES)
FREE = st.dictionaries(TEXT, st.recursive(TEXT | st.booleans() | st.integers() | FLOATS, st.lists, max_leaves=4))
BRANCHES = st.builds(
    Branch,
    before=LEAVES,
    count=st.integers(),
    names=st.dictionaries(TEXT, TEXT, max_size=3),
    leaves=st.dictionaries(TEXT, LEAVES, max_size=2),
    stack=st.lists(LEAVES, max_size=2),
    pairs=st.lists(st.tuples(st.integers(), TEXT), max_size=2).map(tuple),
    maybe=st.none() | LEAVES,
    free=FREE,
)


@settings(max_examples=80, deadline=None)
@given(branch=BRANCHES, flag=st.booleans(), tags=st.frozensets(TEXT, max_size=3))
def test_a_dump_loads_to_the_same_values(tmp_path_factory, branch, flag, tags):
    config = Root(branch=branch, flag=flag, tags=tags)
    loaded = reload(config, tmp_path_factory.mktemp("dump"))
    assert loaded == config
    assert config_hash(loaded) == config_hash(config)


def test_infinite_numbers_survive(tmp_path):
    assert reload(Leaf(number=float("-inf")), tmp_path) == Leaf(number=float("-inf"))


def test_the_layout_is_declaration_order_with_unset_keys_as_comments():
    config = Root(
        branch=Branch(count=2, before=Leaf(note=None, plain_note=None), stack=[Leaf(text="s")], names={"a b": "c"})
    )
    text = dump_toml(config)
    lines = [line for line in text.splitlines() if line]
    assert lines == [
        'path = "a/b"',
        'colour = "red"',
        "flag = false",
        "tags = []",
        "[branch]",
        "count = 2",
        "pairs = []",
        "# maybe = (unset)",
        "[branch.before]",
        'text = ""',
        "number = 0.0",
        'note = "none"',
        'plain_note = "none"',
        "[branch.names]",
        '"a b" = "c"',
        "[branch.leaves]",
        "[branch.leaves.a]",
        'text = "preset"',
        "number = 0.0",
        'note = "default"',
        "# plain_note = (unset)",
        "[[branch.stack]]",
        'text = "s"',
        "number = 0.0",
        'note = "default"',
        "# plain_note = (unset)",
        "[branch.free]",
    ]
    assert tomllib.loads(text)["branch"]["stack"][0]["text"] == "s"


def test_the_hash_depends_on_every_value_and_on_nothing_else():
    assert config_hash(Root()) == config_hash(Root(branch=Branch(count=1)))
    changed = [Root(flag=True), Root(branch=Branch(before=Leaf(note=None))), Root(branch=Branch(names={"a": "b"}))]
    assert len({config_hash(config) for config in [Root(), *changed]}) == 4
    assert config_hash(Branch(names={"a": "1", "b": "2"})) == config_hash(Branch(names={"b": "2", "a": "1"}))


def test_a_value_that_toml_cannot_say_is_refused():
    with pytest.raises(ValueError, match="type complex cannot be written"):
        dump_toml(Branch(free={"z": 1j}))
