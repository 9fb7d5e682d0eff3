"""A choice among kinds: a table that is one of several models, by what one of its keys says.

Example:
    class Fixed(Config):
        name: Literal["fixed"] = "fixed"

    class Cosine(Config):
        name: Literal["cosine"] = "cosine"
        period: int = 100

    Schedule = Annotated[Fixed | Cosine, OneOf()]

The first model is the one where the key is left out, if it has a default there. One model may have a plain text at the key: it is chosen by
an import reference (`module:function`), for what is a user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from whet.config.base import Config
from whet.config.schema import KeyPath, Options, child_options, is_config, options_of

OWN = "module:function"
"""Placeholder for the references that choose a user's own model."""


@dataclass(frozen=True, slots=True)
class Members:
    """The models of a choice."""

    key: str
    """The key that says which."""
    by_word: Mapping[str, type[Config]]
    """The models by what the key says, in declaration order."""
    own: type[Config] | None
    """The model that an import reference chooses."""
    default: str | None
    """Value of the key if it is left out; None: it is required."""

    @property
    def words(self) -> list[str]:
        """Possible words of the key, for people."""
        return [*self.by_word, *([OWN] if self.own is not None else [])]

    def word_of(self, table: object) -> str | None:
        """Word of a table, or of a model; None: it has no word, or no text."""
        if isinstance(table, Config):
            word: object = getattr(table, self.key, None)
        elif isinstance(table, Mapping):
            word = cast(Mapping[str, object], table).get(self.key, self.default)
        else:
            word = None
        return word if isinstance(word, str) else None

    def model_of(self, table: object) -> type[Config] | None:
        """The model that a table chooses; None: no model has this name."""
        word = self.word_of(table)
        return self.own if word is not None and ":" in word else self.by_word.get(word or "")


class OneOf:
    """Marks a union of models as a choice, in `Annotated`. A value is validated as the model that it chooses, and as no other."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = members_of(options_of(source))
        assert members is not None, f"{source} has no key that tells its models apart"
        choices = {word: handler.generate_schema(model) for word, model in members.by_word.items()}
        if members.own is not None:
            choices[OWN] = handler.generate_schema(members.own)

        def word_of(value: Any) -> str | None:
            word = members.word_of(value)
            return OWN if members.own is not None and word is not None and ":" in word else word

        return core_schema.tagged_union_schema(choices, word_of)


def members_of(options: Options) -> Members | None:
    """The choice that alternatives are; None: there are not two models among them, or no key tells them apart."""
    models = [option for option in options if is_config(option)]
    if len(models) < 2:
        return None
    for key in models[0].model_fields:
        if not all(key in model.model_fields for model in models):
            continue
        by_word = {word: model for model in models for word in _words(model, key)}
        own = [model for model in models if not _words(model, key)]
        if by_word and len(own) <= 1:
            first = models[0].model_fields[key].default
            return Members(key, by_word, own[0] if own else None, first if isinstance(first, str) else None)
    return None


def chosen(options: Options, value: object) -> Options:
    """The alternatives without the models that a table does not choose; all of them where it chooses none."""
    members = members_of(options)
    model = None if members is None else members.model_of(value)
    return options if model is None else tuple(option for option in options if option is model or not is_config(option))


def options_at(model: type[Config], path: KeyPath, data: object) -> Options:
    """Possible types at a path, by the choices in the tables of `data` above it."""
    options: Options = (model,)
    for key in path:
        options = child_options(chosen(options, data), key)
        data = child_of(data, key)
    return options


def child_of(data: object, key: str | int) -> object:
    """Value at a key of a table, or at an index of a list; None: it has none."""
    if isinstance(data, Mapping):
        return cast(Mapping[Any, object], data).get(key)
    if isinstance(data, list) and isinstance(key, int):
        items = cast(list[object], data)
        return items[key] if key < len(items) else None
    return None


def node_at(data: object, path: KeyPath) -> object:
    """Value at a path; None: there is none."""
    for key in path:
        data = child_of(data, key)
    return data


def _words(model: type[Config], key: str) -> list[str]:
    annotation = model.model_fields[key].annotation
    return [word for word in get_args(annotation) if isinstance(word, str)] if get_origin(annotation) is Literal else []
