"""The help text of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from whet.config import Config, KeyDoc, describe


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
