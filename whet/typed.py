"""Command lines checked before any heavy import: settings in the wrong form, secrets, environment
variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from whet.config import Config, ConfigError
from whet.config.elsewhere import known_elsewhere
from whet.config.errors import nearest
from whet.config.schema import key_paths, path_text

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
_SAME = (
    ("--devices", "gpus", "num-gpus", "n-gpus", "num-devices", "world-size", "nproc-per-node"),
    ("--per-node", "gpus-per-node"),
    ("--memory", "gpu-memory", "gpu-mem", "vram"),
    ("--longest", "seq-len", "max-length", "max-tokens"),
    ("--run-dir", "output", "output-dir", "out", "dir"),
    ("--to", "output", "output-dir", "out", "dir"),
    ("--rollout", "step", "steps"),
    ("--rollouts", "step", "steps"),
    ("--task", "prompt"),
    ("--problems", "samples", "test-size"),
)
"""An option, and other words for it."""
_ALIKE = 0.75
"""Similarity (difflib's ratio) from which an option counts as misspelt."""
_MAX_PLACES = 3
"""Number of settings of one name that an error lists."""
_LISTED = "--keys in place of the file lists all settings"


def check_address(url: str) -> None:
    """Check the form of a server's address.

    Raises:
        ConfigError: it is no URL of a host.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError([f"{url!r} is not the address of a server; write http://HOST:PORT"])


def check_options(command: str, given: Sequence[str], options: Sequence[str]) -> None:
    """Check the options of a command that takes no settings.

    Args:
        command: its name.
        given: what was typed after it.
        options: those that it has.

    Raises:
        ConfigError: naming an option that the command lacks, and the nearest one.
    """
    for word in given:
        if word == "--":
            return
        name = word.partition("=")[0]
        if not name.startswith("--") or name in options:
            continue
        bare = name.removeprefix("--").replace("_", "-")
        same = [option for option, *others in _SAME if bare in others and option in options]
        if found := same or get_close_matches(name, options, 1, _ALIKE):
            raise ConfigError([f"there is no option {name} of whet {command}; did you mean {found[0]}?"])
        raise ConfigError([f"there is no option {name} of whet {command}; it has {', '.join(options)}"])


def check_typed(config: Path | None, overrides: Sequence[str], settings: type[Config] | None = None) -> None:
    """Check that settings are written as key=value, and that none of them is a secret.

    Args:
        config: the TOML file that was named; None: the command reads none.
        overrides: what was typed after it.
        settings: the model of the file, to name the path of a setting that was written like an option.

    Raises:
        ConfigError: saying how to write it. A secret is not repeated.
    """
    if config is not None and str(config).startswith("-") and not config.exists():
        raise ConfigError([f"there is no option {config}; the TOML file is named without one: whet COMMAND CONFIG.toml"])
    if config is not None and "=" in str(config) and not config.exists():
        raise ConfigError([f"the TOML file comes first, then the settings: whet COMMAND CONFIG.toml {config}"])
    for index, text in enumerate(overrides):
        after = overrides[index + 1] if index + 1 < len(overrides) else None
        _check_form(text, after, settings)
        _check_secret(text)


def _check_form(text: str, after: str | None, settings: type[Config] | None) -> None:
    key, equals, _ = text.partition("=")
    bare = key.lstrip("-")
    value = text if equals else f"{bare}={after if after is not None and '=' not in after else 'VALUE'}"
    if key.startswith("-"):
        places = [bare] if settings is None else _places_of(bare.replace("-", "_"), settings)
        shown = "VALUE" if _is_secret(bare) else value.partition("=")[2]
        written = f"settings are written without dashes, as key=value: {' or '.join(f'{place}={shown}' for place in places)}"
        advice = known_elsewhere(bare) or (written if places else f"no setting is named like it, either: {_LISTED}")
        raise ConfigError([f"there is no option {key}; {advice}"])
    if not equals and key.endswith(".toml"):
        raise ConfigError([f"one TOML file is read, and {key} is a second one; settings on top of it are written as key=value"])
    if not equals:
        hint = f"{bare}=VALUE" if _is_secret(bare) else value
        raise ConfigError([f"{text!r} is not of the form key=value: write {hint}"])
    if _VARIABLE.fullmatch(key):
        raise ConfigError([f"{key} is an environment variable, not a setting: set it in the shell first (export {key}=...)"])


def _places_of(name: str, settings: type[Config]) -> list[str]:
    """The settings of that path, or of that name in a table; else those with the nearest name."""
    paths = [path for path in key_paths(settings) if not {"<name>", "[]"} & {*path}]
    if name in (known := list(map(path_text, paths))):
        return [name]
    leaf = name.rpartition(".")[2]
    for wanted in (leaf, *nearest(leaf, {path[-1] for path in paths}, 1)):
        if found := [place for place, path in zip(known, paths, strict=True) if path[-1] == wanted]:
            return list(dict.fromkeys(found))[:_MAX_PLACES]
    return []


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
