"""A table that is one of several kinds: how it is read, what its errors say, how it is described and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from whet.config import (
    Config,
    ConfigError,
    KeyDoc,
    OneOf,
    Reference,
    chosen,
    describe,
    describe_table,
    dump_toml,
    load_config,
    members_of,
)
from whet.config.schema import options_of


class Part(Config):
    depth: int = 1
    width: int | None = 2


class Common(Config):
    rate: float = Field(default=0.1, ge=0)
    """How fast."""
    part: Part = Field(default_factory=Part)


class Plain(Common):
    """The plain one."""

    name: Literal["plain"] = "plain"
    """Which."""


class Steep(Common):
    """The steep one."""

    name: Literal["steep"] = "steep"
    rate: float = Field(default=0.5, ge=0)
    """How fast."""
    slope: float = 2.0
    """How steep."""
    part: Part = Field(default_factory=lambda: Part(depth=7))


class Wavy(Common):
    name: Literal["wavy"] = "wavy"
    slope: float = 2.0
    """How steep."""
    period: int | None = 5


class Own(Config):
    """One of your own."""

    name: Reference
    options: Mapping[str, Any] = Field(default_factory=dict)


Shape = Annotated[Plain | Steep | Wavy | Own, OneOf()]


class Named(Config):
    kind: Literal["named"]
    size: int = 0


class Other(Config):
    kind: Literal["other"]


class Run(Config):
    seed: int = 0
    shape: Shape = Field(default_factory=Plain)
    """The shape."""
    more: list[Shape] = Field(default_factory=list)
    tag: Annotated[Named | Other, OneOf()] | None = None


def load(*overrides, file=None):
    return load_config(Run, file, overrides)


def told(*overrides):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return list(caught.value.problems)


def test_the_key_says_which_whatever_the_order_and_the_first_is_the_default():
    assert load("shape.slope=3", "shape.name=steep").shape == Steep(slope=3.0)
    assert load("shape.name=steep", "shape.slope=3").shape == Steep(slope=3.0)
    assert load("shape.rate=3").shape == Plain(rate=3.0)
    assert load("shape={name = 'wavy', period = 'none'}").shape == Wavy(period=None)
    assert load("shape.name=steep", "shape.part.width=none").shape == Steep(part=Part(depth=7, width=None)), "the kind's own defaults"
    assert load("shape.name=mine:f", "shape.options.a=1").shape == Own(name="mine:f", options={"a": 1})
    assert load("more=[{slope=1, name='wavy'}, {rate=3}]").more == [Wavy(slope=1.0), Plain(rate=3.0)]
    assert load("tag.kind=named").tag == Named(kind="named") and load("tag=none").tag is None
    assert Run(shape=Steep()).shape == Run.model_validate({"shape": {"name": "steep"}}).shape == Steep()


def test_a_file_and_overrides_together_choose(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[shape]\nname = "steep"\nslope = 3\n[shape.part]\nwidth = 9\n')
    assert load("shape.rate=1", file=path).shape == Steep(slope=3.0, rate=1.0, part=Part(depth=7, width=9))
    with pytest.raises(ConfigError, match=r'shape\.slope is a setting of steep, wavy; shape\.name is "plain"'):
        load("shape.name=plain", file=path)


@pytest.mark.parametrize(
    ("overrides", "problems"),
    [
        (["shape.rat=1"], ["shape.rat: unknown key; did you mean shape.rate?"]),
        (["shape.name=steep", "shape.slop=1"], ["shape.slop: unknown key; did you mean shape.slope?"]),
        (["shape.slop=1"], ["shape.slop: unknown key; the keys here are name, rate, part"]),
        (["shape.period=1"], ['shape.period is a setting of wavy; shape.name is "plain"']),
        (["shape.name=steep", "shape.options={}"], ['shape.options is a setting of module:function; shape.name is "steep"']),
        (["shape.name=m:f", "shape.rate=1"], ['shape.rate is a setting of plain, steep, wavy; shape.name is "m:f"']),
        (["shape.name=step"], ['shape.name = "step": expected one of plain, steep, wavy, module:function; did you mean steep?']),
        (["shape.name=3"], ["shape.name = 3: expected one of plain, steep, wavy, module:function"]),
        (["shape.name=m:"], ["shape.name = \"m:\": 'm:' is not an import reference: write module:name (for example my_rewards:score) or "
                             "path/to/file.py:name"]),
        (["shape=steep"], ['shape = "steep": expected a table; did you mean shape.name=steep?']),
        (["shape=true"], ["shape = true: expected a table: write shape={} for what it is by default, or set its keys (name, rate, part)"]),
        (["tag={size=1}"], ["tag.kind: is required and not set; expected one of named, other"]),
        (["tag={kind='named', size='x'}"], ['tag.size = "x": expected an integer']),
        (["more=[{}, {name='wavy', rat=1}]"], ["more[1].rat: unknown key; did you mean more[1].rate?"]),
        (["more=[{name='way'}]"], ['more[0].name = "way": expected one of plain, steep, wavy, module:function; did you mean wavy?']),
    ],
)
def test_errors_are_about_the_kind_that_was_chosen(overrides, problems):
    assert told(*overrides) == problems


def test_a_table_per_kind_is_told_where_its_keys_stand():
    assert told("shape.steep.slope=1", "shape.name=steep", "shape.steep.part.dept=1", "shape.steep.rte=1") == [
        "shape.steep.slope: the settings of steep stand in [shape] itself; write shape.slope",
        "shape.steep.part.dept: the settings of steep stand in [shape] itself; write shape.part.dept",
        "shape.steep.rte: the settings of steep stand in [shape] itself; write shape.rate",
    ]
    other = 'the settings of wavy stand in [shape] itself, and shape.name is "plain"; write shape.name=wavy'
    assert told("shape.wavy.period=1") == [f"shape.wavy.period: {other} and shape.period"]
    assert told("shape.wavy={}") == [f"shape.wavy: {other}"]
    assert told("shape.plain={}") == ["shape.plain: the settings of plain stand in [shape] itself; leave out [shape.plain]"]


def test_a_long_table_per_kind_is_one_error_with_the_table_to_write():
    keys = [f"shape.steep.{key}" for key in ("slope=1", "rte=2", "nothing_like_it=3", "part.depth=4")]
    assert told(*keys, "shape.name=steep") == [
        "shape.steep: the settings of steep stand in [shape] itself; write\n"
        '[shape]\nname = "steep"\nslope = 1\nrate = 2\nnothing_like_it = 3\npart.depth = 4'
    ]
    (other,) = told(*keys)
    assert other.startswith('shape.steep: the settings of steep stand in [shape] itself, and shape.name is "plain"; write\n[shape]\n')


def test_all_problems_are_told_at_once():
    assert told("shape.name=wavy", "seed=x", "shape.rate=-1", "shape.slop=1", "shape.steep.slope=1", "shape.options={}") == [
        'seed = "x": expected an integer',
        "shape.rate = -1: expected at least 0.0",
        "shape.slop: unknown key; did you mean shape.slope?",
        'shape.steep.slope: the settings of steep stand in [shape] itself, and shape.name is "wavy"; '
        "write shape.name=steep and shape.slope",
        'shape.options is a setting of module:function; shape.name is "wavy"',
    ]


@pytest.mark.parametrize("shape", [Plain(), Steep(rate=1.0), Wavy(period=None), Own(name="m:f", options={"a": {"b": 1}})])
def test_what_is_written_reads_back_with_the_kind_first(shape, tmp_path):
    config = Run(shape=shape, more=[Steep(), Plain()], tag=Other(kind="other"))
    path = tmp_path / "run.toml"
    path.write_text(dump_toml(config))
    assert load(file=path) == config
    assert f'[shape]\nname = "{shape.name}"\n' in path.read_text()


def test_common_keys_are_described_once_and_then_what_differs():
    assert [doc for doc in describe(Run) if doc.path.startswith("shape")] == [
        KeyDoc("shape", "table", "", "The shape."),
        KeyDoc(
            "shape.name",
            '"plain" | "steep" | "wavy" | "module:function"',
            '"plain"',
            "Which.",
            words=(("plain", "The plain one."), ("steep", "The steep one."), ("wavy", ""), ("module:function", "One of your own.")),
        ),
        KeyDoc("shape.rate", "number", "0.1", "How fast."),
        KeyDoc("shape.part", "table", "", ""),
        KeyDoc("shape.part.depth", "integer", "1", ""),
        KeyDoc("shape.part.width", "integer | none", "2", ""),
        KeyDoc("shape.rate", "number", "0.5", "How fast.", kinds=("steep",)),
        KeyDoc("shape.part.depth", "integer", "7", "", kinds=("steep",)),
        KeyDoc("shape.slope", "number", "2.0", "How steep.", kinds=("steep", "wavy")),
        KeyDoc("shape.period", "integer | none", "5", "", kinds=("wavy",)),
        KeyDoc("shape.options", "table", "{}", "", kinds=("module:function",)),
    ]
    assert [doc.path for doc in describe(Run) if doc.path.startswith("tag")] == ["tag", "tag.kind", "tag.size"]


def test_one_table_is_described_or_one_kind_of_it():
    part = [doc.path for doc in describe_table(Run, "shape.part")]
    assert part == ["shape.part", "shape.part.depth", "shape.part.width", "shape.part.depth"]
    steep = {doc.path: doc.default for doc in describe_table(Run, "shape.steep")}
    assert steep == {
        "shape": "", "shape.name": '"steep"', "shape.rate": "0.5", "shape.slope": "2.0",
        "shape.part": "", "shape.part.depth": "7", "shape.part.width": "2",
    }
    with pytest.raises(ConfigError, match=r"there is no setting 'shape.step'; did you mean shape.steep"):
        describe_table(Run, "shape.step")
    with pytest.raises(ConfigError, match=r"there is no setting 'zzz'; there is seed, shape, more, tag"):
        describe_table(Run, "zzz")


def test_members_and_the_one_that_is_chosen():
    options = options_of(Shape)
    members = members_of(options)
    assert members.key == "name" and members.default == "plain" and members.own is Own
    assert members.by_word == {"plain": Plain, "steep": Steep, "wavy": Wavy} and members.words[-1] == "module:function"
    assert chosen(options, {"name": "steep"}) == (Steep,) and chosen(options, {}) == (Plain,) and chosen(options, Wavy()) == (Wavy,)
    assert chosen((*options, type(None)), {"name": "a:b"}) == (Own, type(None)) and chosen(options, {"name": "x"}) == options
    assert members_of((Plain,)) is None and members_of((Plain, Part)) is None and members_of((int, str)) is None
