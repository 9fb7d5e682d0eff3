"""Description of a configuration: every key with its type, default and help text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic_core import PydanticUndefined

from whet.config.base import Config
from whet.config.errors import ConfigError, nearest, show
from whet.config.schema import Options, default_of, fields_of, is_config, nested_models, options_of, path_text, type_text
from whet.config.union import OWN, Members, members_of, options_at


@dataclass(frozen=True, slots=True)
class KeyDoc:
    """One key of a configuration."""

    path: str
    """`train.optim.lr`; `<name>` is a name the user chooses, `[]` for the items of a list."""
    type: str
    default: str | None
    """As TOML writes it, "none" if it is unset, "" for a table with keys of its own; None if the key is required."""
    doc: str
    kinds: tuple[str, ...] = ()
    """In a table that is one of several kinds: those that have the key, or this default; none: most of them."""
    words: tuple[tuple[str, str], ...] = ()
    """Words of the key that chooses among kinds, each with the description of its kind."""


def describe(model: type[Config]) -> list[KeyDoc]:
    """Every key below a model, in declaration order; a table comes before its keys.

    Of a choice among kinds: the key that says which, what is the same for most of them, then what only some have or have another default
    for.
    """
    return list(_describe(model, (), None, ()))


def overview(docs: Sequence[KeyDoc]) -> list[KeyDoc]:
    """Every key once: a table whose keys an earlier table has, too, names that one and lists only the keys that differ from it."""
    by_path = {doc.path: doc for doc in docs}
    inside = {path: [doc for doc in docs if doc.path.startswith(f"{path}.")] for path in by_path}
    kept: list[KeyDoc] = []
    whole: list[str] = []
    """Tables that are listed with all their keys."""
    merged: list[str] = []
    for doc in docs:
        if any(doc.path.startswith(f"{table}.") for table in merged):
            continue
        like = next((table for table in whole if _mostly_in(inside[doc.path], doc.path, inside[table], table)), None)
        if like is None:
            kept.append(doc)
            if inside[doc.path]:
                whole.append(doc.path)
            continue
        merged.append(doc.path)
        other = [key for key in inside[doc.path] if not _same(key, by_path.get(like + key.path.removeprefix(doc.path)))]
        but = ", but for those that follow" if other else ""
        kept += [replace(doc, doc=f"{doc.doc} Its settings are among those of {like}{but}.".lstrip()), *other]
    return kept


def _mostly_in(keys: Sequence[KeyDoc], path: str, known: Sequence[KeyDoc], other: str) -> bool:
    """True if at least four of five keys of a table, and more than two, are those of another one."""
    by_path = {doc.path.removeprefix(other): doc for doc in known}
    num_same = sum(_same(doc, by_path.get(doc.path.removeprefix(path))) for doc in keys)
    return num_same > 2 and 5 * num_same >= 4 * len(keys) and not path.startswith(f"{other}.")


def _same(one: KeyDoc, other: KeyDoc | None) -> bool:
    return other is not None and replace(one, path="") == replace(other, path="")


def describe_table(model: type[Config], prefix: str) -> list[KeyDoc]:
    """A key and those below it; `algo.ppo`: all those of one kind of table, with its defaults.

    Raises:
        ConfigError: there is no such key.
    """
    every = describe(model)
    found = [doc for doc in every if doc.path == prefix or doc.path.startswith((f"{prefix}.", f"{prefix}["))]
    if found:
        return found
    *above, word = prefix.split(".")
    members = members_of(options_at(model, tuple(above), {}))
    if members is not None and word in members.by_word:
        kind = members.by_word[word]
        return [KeyDoc(".".join(above), "table", "", _one_line(kind.__doc__)), *_describe(kind, tuple(above), None, ())]
    kinds = [path_text((*doc.path.split(".")[:-1], word)) for doc in every for word, _ in doc.words if word != OWN]
    near = nearest(prefix, dict.fromkeys([*kinds, *(doc.path for doc in every)]))
    hint = f"did you mean {' or '.join(near)}?" if near else f"there is {', '.join(fields_of(model))}"
    raise ConfigError([f"there is no setting {prefix!r}; {hint}"])


def _describe(
    model: type[Config], path: tuple[str, ...], instance: Config | None, above: tuple[type[Config], ...]
) -> Iterator[KeyDoc]:
    """`instance` holds the defaults that the model's owner gives it."""
    if model in above:
        return
    for name, field in fields_of(model).items():
        options = options_of(field.annotation)
        default = getattr(instance, name) if instance is not None else default_of(field)
        yield KeyDoc(path_text((*path, name)), type_text(options), _default_text(default), _one_line(field.description))
        yield from _below(options, (*path, name), default, (*above, model))


def _below(options: Options, path: tuple[str, ...], default: Any, above: tuple[type[Config], ...]) -> Iterator[KeyDoc]:
    """The keys below one whose alternatives these are."""
    members = members_of(options)
    if members is not None:
        yield from _of_kinds(members, path, above)
        return
    for option in options:
        for inside, markers in nested_models(option):
            given = default if is_config(option) and type(default) is inside else None
            yield from _describe(inside, (*path, *markers), given, above)


def _of_kinds(members: Members, path: tuple[str, ...], above: tuple[type[Config], ...]) -> Iterator[KeyDoc]:
    """The keys of a choice's models, each once for every different description."""
    key = path_text((*path, members.key))
    models = {**members.by_word, **({} if members.own is None else {OWN: members.own})}
    docs_by_word = {word: [doc for doc in _describe(model, path, None, above) if doc.path != key] for word, model in models.items()}
    first = next(iter(models.values())).model_fields[members.key]
    words = tuple((word, _one_line(model.__doc__)) for word, model in models.items())
    default = None if members.default is None else show(members.default)
    yield KeyDoc(key, " | ".join(f'"{word}"' for word in members.words), default, _one_line(first.description), words=words)
    common = _common([docs_by_word[word] for word in members.by_word])
    yield from common
    others: dict[KeyDoc, list[str]] = {}
    for word, docs in docs_by_word.items():
        for doc in docs:
            if doc not in common:
                others.setdefault(doc, []).append(word)
    yield from (replace(doc, kinds=tuple(words)) for doc, words in others.items())


def _common(docs_by_word: Sequence[Sequence[KeyDoc]]) -> list[KeyDoc]:
    """Every key that all models have, with its most frequent description."""
    counts: dict[str, Counter[KeyDoc]] = {}
    for docs in docs_by_word:
        for doc in docs:
            counts.setdefault(doc.path, Counter())[doc] += 1
    return [count.most_common(1)[0][0] for count in counts.values() if count.total() == len(docs_by_word)]


def _default_text(default: Any) -> str | None:
    if default is PydanticUndefined:
        return None
    if isinstance(default, Config):
        return ""
    return "none" if default is None else show(default)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
