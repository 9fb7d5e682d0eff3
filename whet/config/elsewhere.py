"""Settings under the names that slime, verl and TRL have for them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

NO_SETTING = "no setting: "
_OF_ENGINES = "actor_rollout_ref.rollout.engine_kwargs"
_BEGINNINGS = {
    f"{_OF_ENGINES}.vllm.": "engine.vllm.args.{} (with engine.name=vllm)",
    f"{_OF_ENGINES}.sglang.": "engine.sglang.args.{} (with engine.name=sglang)",
    "sglang_": "engine.sglang.args.{} (with engine.name=sglang)",
    "actor_rollout_ref.model.override_config.": "model.config.{}",
    "critic.model.override_config.": "model.config.{}",
}
"""Answers to all names with a beginning; `{}` is the rest of the name."""


@cache
def names_elsewhere() -> dict[str, str]:
    """The setting of whet by the name elsewhere, in words: keys, or `no setting: ` and the reason."""
    lines = files("whet.config").joinpath("names_elsewhere.tsv").read_text(encoding="utf-8").splitlines()
    return dict(line.split("\t") for line in lines)


def known_elsewhere(key: str) -> str | None:
    """The answer to a key of slime, verl or TRL, also in the form of an option; None: they have no such key."""
    name = key.lstrip("-+").replace("-", "_")
    found = names_elsewhere().get(name)
    if found is None:
        rest = (words.format(name.removeprefix(known)) for known, words in _BEGINNINGS.items() if name.startswith(known) and name != known)
        found = next(rest, None)
    if found is None:
        return None
    return f"whet has {found}" if found.startswith(NO_SETTING) else f"in whet it is {found}"
