"""Command lines checked before any heavy import: settings in the wrong form, secrets, environment
variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from whet.config import ConfigError
from whet.config.elsewhere import known_elsewhere

_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_SECRET_WORDS = {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "authorization", "bearer", "apikey"}
_SECRET_PAIRS = {(of, "key") for of in ("api", "access", "secret", "private", "auth", "account", "service", "client")}
_SECRET_PAIRS |= {(of, "token") for of in ("hf", "hub", "auth", "access", "api", "refresh", "session", "bot", "github", "wandb")}
_SECRET_SHAPES = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-[\w-]{8,}|hf_(?=\w*[A-Z0-9])[A-Za-z0-9]{8,}|gh[pousr]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}"
    r"|AKIA[A-Z0-9]{12,}|AIza[\w-]{20,}|xox[a-z]-[\w-]{6,}|eyJ[\w-]{6,}\.[\w-]{4,})|://[^/\s@]+:[^/\s@]+@"
)
"""Keys of well-known services, and a password in a URL."""
_NAMES_A_VARIABLE = "_env"
"""The end of a setting that holds the name of an environment variable, such as `api_key_env`."""


def check_typed(config: Path | None, overrides: Sequence[str]) -> None:
    """Check that settings are written as key=value, and that none of them is a secret.

    Raises:
        ConfigError: saying how to write it. A secret is not repeated.
    """
    if config is not None and str(config).startswith("-") and not config.exists():
        raise ConfigError([f"there is no option {config}; the TOML file is named without one: whet COMMAND CONFIG.toml"])
    if config is not None and "=" in str(config) and not config.exists():
        raise ConfigError([f"the TOML file comes first, then the settings: whet COMMAND CONFIG.toml {config}"])
    for index, text in enumerate(overrides):
        after = overrides[index + 1] if index + 1 < len(overrides) else None
        _check_form(text, after)
        _check_secret(text)


def _check_form(text: str, after: str | None) -> None:
    key, equals, _ = text.partition("=")
    bare = key.lstrip("-")
    value = text if equals else f"{bare}={after if after is not None and '=' not in after else 'VALUE'}"
    if key.startswith("-"):
        hint = f"{bare}={'VALUE' if _is_secret(bare) else value.partition('=')[2]}"
        advice = known_elsewhere(bare) or f"settings are written without dashes, as key=value: {hint}"
        raise ConfigError([f"there is no option {key}; {advice}"])
    if not equals and key.endswith(".toml"):
        raise ConfigError([f"one TOML file is read, and {key} is a second one; settings on top of it are written as key=value"])
    if not equals:
        hint = f"{bare}=VALUE" if _is_secret(bare) else value
        raise ConfigError([f"{text!r} is not of the form key=value: write {hint}"])
    if _VARIABLE.fullmatch(key):
        raise ConfigError([f"{key} is an environment variable, not a setting: set it in the shell first (export {key}=...)"])


def _check_secret(text: str) -> None:
    key, _, value = text.partition("=")
    if (_is_secret(key) and value.strip().strip("\"'")) or _SECRET_SHAPES.search(value):
        raise ConfigError(
            [
                f"{key}: a secret does not belong on the command line: everybody on this machine sees it there, and the run's config.toml "
                "and starts.jsonl would keep it. Put it into an environment variable; settings that need a key take the variable's name "
                "(reward.options.api_key_env=NAME), and your own code can read os.environ"
            ]
        )


def _is_secret(key: str) -> bool:
    """True if a part of a dotted key names a secret."""
    for part in key.split("."):
        words = part.lower().replace("-", "_").split("_")
        pairs = pairwise(words)
        if not part.endswith(_NAMES_A_VARIABLE) and (_SECRET_WORDS & {*words} or any(pair in _SECRET_PAIRS for pair in pairs)):
            return True
    return False
