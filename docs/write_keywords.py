"""Writes whet/api/keywords.pyi: the keyword arguments of `whet.train` and its like, for editors and type checkers, from the settings.

    python docs/write_keywords.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from whet.config import Config, members_of  # noqa: E402
from whet.config.schema import fields_of, is_config, is_list, is_table, item_options, options_of  # noqa: E402
from whet.settings.supervised import RUN_CONFIGS  # noqa: E402

FILE = ROOT / "whet" / "api" / "keywords.pyi"
GIVEN = {"model", "data", "reward", "algo"}
"""Arguments of the calls by their own names."""
NAMES = {"train": "TrainSettings", "sft": "SftSettings", "dpo": "DpoSettings", "rm": "RewardModelSettings"}
HEAD = '''"""Keyword arguments of the calls, for editors alone: written by `python docs/write_keywords.py` from the settings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict
'''
PLAIN = {int: "int", float: "float", str: "str", bool: "bool", NoneType: "None", Any: "Any"}


class Tables:
    """The tables that the settings have, as text."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def name_of(self, models: tuple[type[Config], ...]) -> str:
        """Name of the table of a model, or of one that is one of several."""
        name = models[0].__name__.removesuffix("Config") + "Table"
        if name not in self.texts:
            self.texts[name] = ""
            fields = {key: field for model in models for key, field in fields_of(model).items()}
            kinds = {key: [model.model_fields[key] for model in models if key in model.model_fields] for key in fields}
            lines = [line for key in fields for line in self.key(key, kinds[key])]
            self.texts[name] = f"class {name}(TypedDict, total=False):\n" + "\n".join(lines)
        return name

    def key(self, name: str, fields: list[Any]) -> Iterator[str]:
        """Lines of a key; `fields` are its declarations, one for each kind of table."""
        kinds = dict.fromkeys(self.type_of(field) for field in fields)
        yield f"    {name}: {' | '.join(dict.fromkeys(part for kind in kinds for part in kind.split(' | ')))}"
        text = " ".join((fields[0].description or "").split()).replace("\\", "\\\\").replace('"""', "'''")
        if text:
            yield f'    """{text}{" " if text.endswith(chr(34)) else ""}"""'

    def type_of(self, field: Any) -> str:
        """Type of a key's value in Python."""
        words = field.description or ""
        is_code = "mport reference" in words or "names a callable" in words
        if words.startswith(("File, folder or hub data set", "Data files")):
            return "Any"
        return self.types(options_of(field.annotation), is_code)

    def types(self, options: tuple[Any, ...], is_code: bool) -> str:
        models = tuple(option for option in options if is_config(option))
        if members_of(options) is not None:
            return self.name_of(models)
        return " | ".join(dict.fromkeys(self.one(option, is_code) for option in options))

    def one(self, option: Any, is_code: bool) -> str:
        if option is str and is_code:
            return "str | Callable[..., Any]"
        if option in PLAIN:
            return PLAIN[option]
        if get_origin(option) is Literal:
            return f"Literal[{', '.join(map(repr, get_args(option)))}]".replace("'", '"')
        if is_config(option):
            return self.name_of((option,))
        if is_table(option):
            return f"Mapping[str, {self.types(item_options(option), is_code)}]"
        if is_list(option):
            return f"Sequence[{self.types(item_options(option), is_code)}]"
        if isinstance(option, type) and issubclass(option, Enum):
            return f"Literal[{', '.join(repr(each.value) for each in option)}]"
        return "str | Path" if option is Path else "Any"

    def keywords(self, model: type[Config], above: tuple[str, ...] = (), seen: tuple[type[Config], ...] = ()) -> Iterator[tuple[str, Any]]:
        """The keyword arguments below a model, with their declarations: tables, and keys in tables with `__` between the parts."""
        if model in seen:
            return
        for key, field in fields_of(model).items():
            path = (*above, key)
            if path[0] not in GIVEN or len(path) > 1:
                yield "__".join(path), field
            for option in options_of(field.annotation):
                if is_config(option):
                    yield from self.keywords(option, path, (*seen, model))


def text() -> str:
    """The file's content."""
    tables = Tables()
    calls: list[str] = []
    for command, name in NAMES.items():
        found: dict[str, list[Any]] = {}
        for keyword, field in tables.keywords(RUN_CONFIGS[command]):
            found.setdefault(keyword, []).append(field)
        lines = [line for keyword, fields in found.items() for line in tables.key(keyword, fields)]
        calls.append(f"class {name}(TypedDict, total=False):\n" + "\n".join(lines))
    return "\n\n".join([HEAD.rstrip(), *(tables.texts[name] for name in sorted(tables.texts)), *calls]) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
