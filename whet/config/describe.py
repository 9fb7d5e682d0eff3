"""What a configuration can say: every key with its type, default and help text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from whet.config.base import Config
from whet.config.errors import show
from whet.config.schema import default_of, is_config, nested_models, options_of, path_text, type_text


@dataclass(frozen=True, slots=True)
class KeyDoc:
    """One key of a configuration."""

    path: str
    """`train.optim.lr`; `<name>` stands for a name the user chooses, `[]` for the items of a list."""
    type: str
    default: str | None
    """As TOML writes it, "none" if it is unset, "" for a table with keys of its own; None if the key is required."""
    doc: str


def describe(model: type[Config]) -> list[KeyDoc]:
    """Every key below a model, in declaration order; a table comes before its keys."""
    return list(_describe(model, (), None, ()))


def _describe(
    model: type[Config], path: tuple[str, ...], instance: Config | None, above: tuple[type[Config], ...]
) -> Iterator[KeyDoc]:
    """`instance` holds the defaults that the model's owner gives it."""
    if model in above:
        return
    for name, field in model.model_fields.items():
        options = options_of(field.annotation)
        default = getattr(instance, name) if instance is not None else default_of(field)
        yield KeyDoc(path_text((*path, name)), type_text(options), _default_text(default), _one_line(field.description))
        for option in options:
            for inside, markers in nested_models(option):
                given = default if is_config(option) and type(default) is inside else None
                yield from _describe(inside, (*path, name, *markers), given, (*above, model))


def _default_text(default: Any) -> str | None:
    if default is PydanticUndefined:
        return None
    if isinstance(default, Config):
        return ""
    return "none" if default is None else show(default)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
