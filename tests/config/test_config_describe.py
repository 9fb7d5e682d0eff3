"""The help text of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from whet.config import Config, KeyDoc, describe, overview


class Inner(Config):
    lr: float = Field(default=1e-5, description="Peak learning\n rate.")
    kind: Literal["a", "b"] = "a"


class Outer(Config):
    path: Path
    """Where it is."""
    inner: Inner = Inner(lr=0.5)
    """The inner part."""
    sets: dict[str, Inner] = Field(default_factory=dict)
    stack: list[Inner] = Field(default_factory=list)
    maybe: Inner | None = None
    names: list[str] | str = Field(default_factory=lambda: ["x"])
    free: dict[str, Any] = Field(default_factory=dict)
    child: Outer | None = None


def test_every_key_has_its_type_default_and_doc():
    lr_doc = "Peak learning rate."
    assert describe(Outer) == [
        KeyDoc("path", "path", None, "Where it is."),
        KeyDoc("inner", "table", "", "The inner part."),
        KeyDoc("inner.lr", "number", "0.5", lr_doc),
        KeyDoc("inner.kind", '"a" | "b"', '"a"', ""),
        KeyDoc("sets", "table of table", "{}", ""),
        KeyDoc("sets.<name>.lr", "number", "1e-05", lr_doc),
        KeyDoc("sets.<name>.kind", '"a" | "b"', '"a"', ""),
        KeyDoc("stack", "list of table", "[]", ""),
        KeyDoc("stack[].lr", "number", "1e-05", lr_doc),
        KeyDoc("stack[].kind", '"a" | "b"', '"a"', ""),
        KeyDoc("maybe", "table | none", "none", ""),
        KeyDoc("maybe.lr", "number", "1e-05", lr_doc),
        KeyDoc("maybe.kind", '"a" | "b"', '"a"', ""),
        KeyDoc("names", "list of text | text", '["x"]', ""),
        KeyDoc("free", "table", "{}", ""),
        KeyDoc("child", "table | none", "none", ""),
    ]


class Three(Config):
    a: int = 1
    """First."""
    b: int = 2
    c: int = 3
    d: int = 4


class Five(Three):
    e: int = 5


class Two(Config):
    a: int = 1
    """First."""
    b: int = 2


class Tables(Config):
    whole: Five = Five()
    """The first."""
    again: Three | None = None
    """The second."""
    other: Five = Five(b=7)
    small: Two = Two()


def test_an_overview_names_a_table_that_has_the_settings_of_an_earlier_one():
    docs = describe(Tables)
    listed = {doc.path: doc for doc in overview(docs)}
    assert [*listed] == ["whole", *(f"whole.{key}" for key in "abcde"), "again", "other", "other.b", "small", "small.a", "small.b"]
    assert listed["again"].doc == "The second. Its settings are among those of whole."
    assert listed["other"].doc == "Its settings are among those of whole, but for those that follow." and listed["other.b"].default == "7"
    assert listed["whole"] in docs and listed["small.a"] in docs
