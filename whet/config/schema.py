"""Walking the annotations of configuration models: what may stand at a key, and which keys there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from whet.config.base import Config

Options = tuple[Any, ...]
"""The alternatives that an annotation allows: a union's members, or the annotation alone."""

KeyPath = tuple[str | int, ...]

_MAPPINGS = (dict, Mapping)
_SEQUENCES = (list, tuple, set, frozenset, Sequence, Set)
_NAMES = {int: "integer", float: "number", str: "text", bool: "true/false", NoneType: "none", Any: "any value"}


def options_of(annotation: Any) -> Options:
    """The members of a union (nested ones flattened), `Annotated` stripped."""
    if get_origin(annotation) is Annotated:
        return options_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return tuple(option for member in get_args(annotation) for option in options_of(member))
    return (annotation,)


def is_config(option: Any) -> TypeGuard[type[Config]]:
    return isinstance(option, type) and issubclass(option, Config)


def is_enum(option: Any) -> TypeGuard[type[Enum]]:
    return isinstance(option, type) and issubclass(option, Enum)


def is_table(option: Any) -> bool:
    """True if its values are free-named entries (a dict)."""
    return option in _MAPPINGS or get_origin(option) in _MAPPINGS


def is_list(option: Any) -> bool:
    return option in _SEQUENCES or get_origin(option) in _SEQUENCES


def item_options(option: Any) -> Options:
    """Possible types of a dict's values or a list's items."""
    args = tuple(arg for arg in get_args(option) if arg is not Ellipsis)
    if is_table(option):
        args = args[1:]
    return tuple(item for arg in args for item in options_of(arg)) or (Any,)


def child_options(options: Options, key: str | int) -> Options:
    """Possible types one key further down; empty if no alternative has such a key."""
    found: list[Any] = []
    for option in options:
        if is_config(option):
            field = option.model_fields.get(str(key))
            found += options_of(field.annotation) if field else ()
        elif (is_table(option) and isinstance(key, str)) or (is_list(option) and isinstance(key, int)):
            found += item_options(option)
    return tuple(found)


def admits_word(options: Options, word: str) -> bool:
    """True if the word itself is one of the listed values (a Literal's or an Enum's)."""
    for option in options:
        if get_origin(option) is Literal and word in get_args(option):
            return True
        if is_enum(option) and word in [member.value for member in option]:
            return True
    return False


def key_paths(model: type[Config], above: tuple[type[Config], ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key below a model, tables included, in declaration order; `<name>` and `[]` stand for entries."""
    if model in above:
        return
    for name, field in model.model_fields.items():
        yield (name,)
        for option in options_of(field.annotation):
            for inside, marker in nested_models(option):
                for path in key_paths(inside, (*above, model)):
                    yield (name, *marker, *path)


def nested_models(option: Any) -> Iterator[tuple[type[Config], tuple[str, ...]]]:
    """The models in an alternative, with the marker of how to get to them."""
    if is_config(option):
        yield option, ()
    elif is_table(option) or is_list(option):
        marker = "<name>" if is_table(option) else "[]"
        for item in item_options(option):
            for model, markers in nested_models(item):
                yield model, (marker, *markers)


def fields_of(model: type[Config]) -> dict[str, FieldInfo]:
    """The fields in declaration order, after those that only say which kind of table it is (`name: Literal["ppo"]`)."""
    def says_kind(field: FieldInfo) -> bool:
        return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1

    fields = model.model_fields
    return {**{name: field for name, field in fields.items() if says_kind(field)}, **fields}


def default_of(field: FieldInfo) -> Any:
    """A field's default; `PydanticUndefined` where it is required or depends on other fields."""
    if field.default_factory is None or field.default_factory_takes_validated_data:
        return field.default
    return field.get_default(call_default_factory=True)


def path_text(path: Sequence[str | int]) -> str:
    """`a.b[0].c`"""
    text = ""
    for key in path:
        if isinstance(key, int) or key == "[]":
            text += "[]" if key == "[]" else f"[{key}]"
        else:
            text += f".{key}" if text else key
    return text


def type_text(options: Options) -> str:
    """The type in a user's words: `integer`, `list of text`, `"a" | "b"`."""
    return " | ".join(dict.fromkeys(_option_text(option) for option in options))


def _option_text(option: Any) -> str:
    if option in _NAMES:
        return _NAMES[option]
    if get_origin(option) is Literal:
        return " | ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in get_args(option))
    if is_config(option):
        return "table"
    if is_table(option) or is_list(option):
        kind = "table" if is_table(option) else "list"
        inner = item_options(option)
        return kind if inner == (Any,) else f"{kind} of {type_text(inner)}"
    if is_enum(option):
        return " | ".join(f'"{member.value}"' for member in option)
    return str(getattr(option, "__name__", option)).lower()
