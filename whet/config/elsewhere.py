"""Settings under the names that slime, verl and TRL have for them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

NO_SETTING = "no setting: "


@cache
def names_elsewhere() -> dict[str, str]:
    """The setting of whet by the name elsewhere, in words: keys, or `no setting: ` and the reason."""
    lines = files("whet.config").joinpath("names_elsewhere.tsv").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)


def known_elsewhere(key: str) -> str | None:
    """The answer to a key of slime, verl or TRL, also in the form of an option; None: they have no such key."""
    found = names_elsewhere().get(key.lstrip("-+").replace("-", "_"))
    if found is None:
        return None
    return f"whet has {found}" if found.startswith(NO_SETTING) else f"in whet it is {found}"
