"""Secrets out of what leaves the machine: by the names of keys, by what values look like, and by the values known to be secret."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from whet.types import JSON

SECRET = "<secret>"
USER = "<user>"
MIN_KNOWN_CHARS = 4
"""Shorter values are not looked for elsewhere: they would be found everywhere."""
WHOLE_WORD_CHARS = 8
"""Shorter ones count only where they stand alone."""

_NAMES = {
    *("password", "passwords", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials"),
    *("authorization", "cookie", "cookies", "bearer", "apikey", "apikeys", "authtoken", "accesstoken"),
}
"""A key with one of these words is secret."""
_KEY_OF = {"api", "access", "secret", "private", "auth", "signing", "encryption", "ssh", "account", "service", "client", "deploy"}
"""Before `key`, where a key is no dictionary's."""
_TOKEN_OF = {"hf", "huggingface", "hub", "auth", "access", "api", "refresh", "session", "bot", "github", "gitlab", "wandb", "slack"}
"""Before `token`, wherever in the name."""
_TEXT_TOKEN = {
    *("pad", "eos", "bos", "unk", "sep", "cls", "mask", "stop", "start", "end", "begin", "special", "first", "last", "next", "prev"),
    *("per", "each", "image", "video", "audio", "think", "tool", "new", "current", "target", "sampled", "prompt"),
}
"""Before `token` at the end of a name, where it is one of a tokenizer's."""
_VARIABLE_ENDS = {"key", "keys", "pass", "pat", "dsn"}
_PLAIN_WORD = re.compile(r"[a-z]{1,7}|True|False")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SHAPES = re.compile(
    r"-----BEGIN [A-Z0-9 ]+-----.*?(?:-----END [A-Z0-9 ]+-----|\Z)"
    r"|(?<![A-Za-z0-9])(?:"
    r"sk-[\w-]{8,}|[sr]k_(?:live|test)_\w{8,}|gsk_\w{16,}|r8_\w{16,}"
    r"|hf_(?=[A-Za-z0-9]*[A-Z0-9])[A-Za-z0-9]{8,}|hf_[a-z]{20,}"
    r"|gh[pousr]_\w{8,}|github_pat_\w{8,}|glpat-[\w-]{8,}|npm_[A-Za-z0-9]{20,}|pypi-[\w-]{20,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{20,}|ya29\.[\w-]{10,}|xox[a-z]-[\w-]{6,}|xapp-[\w-]{6,}"
    r"|eyJ[\w-]{6,}\.[\w-]{4,}(?:\.[\w-]*)?|wandb_v1_\w{8,})"
    r"|(?<=hooks\.slack\.com/)[\w/]+"
    r"|(?<=://)[^/\s\"'<>]+(?=@)",
    re.DOTALL,
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)[^\s\"',;<]{4,}")
_HEADER = re.compile(r"(?i)\b((?:proxy-)?authorization|(?:set-)?cookie)(\s*[:=]\s*)(?![\s\"'{\[])[^\n]+")
_OPTION = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)(\s+)(\"[^\"]*\"|'[^']*'|[^\s-]\S*)")
_QUOTED = r"[rbfuRBFU]{0,2}(?:\"(?:\\.|[^\"\\])*\"?|'(?:\\.|[^'\\])*'?)"
_ESCAPED = r"\\+[\"'].*?\\+[\"']"
"""A string inside the text of a string, as JSON within JSON has it."""
_PAIR = re.compile(
    rf"([A-Za-z][\w.-]*)(\\*[\"']?\s*(?:=|:(?!:))\s*)"
    rf"(?:({_QUOTED}|{_ESCAPED})|\[[^\]]*\]?|\{{[^}}]*\}}?|[^\s,;)\]}}\"']+)"
)
"""The name, what is between, and in the third group the value if it is quoted."""


def is_secret_name(name: str, *, variable: bool = False) -> bool:
    """Whether what is called so is a secret: `api_key`, `HF_TOKEN`, `smtpPassword`; but not `max_tokens`, `stop_token_ids`, `label_key`.

    `variable`: of an environment variable, where `..._KEY` and the like are secrets too.
    """
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or (variable and words in (["pwd"], ["oldpwd"])):
        return False
    pairs = list(zip(["", *words], words, strict=False))
    return (
        any(word in _NAMES for word in words)
        or words[-1] == "auth"
        or any(before in _KEY_OF and word in ("key", "keys") for before, word in pairs)
        or any(before in _TOKEN_OF and word in ("token", "tokens") for before, word in pairs)
        or (words[-1] == "token" and pairs[-1][0] not in _TEXT_TOKEN)
        or (variable and words[-1] in _VARIABLE_ENDS)
    )


class Redactor:
    """Replaces secrets by `<secret>`, the home folder by `~` and the user's name in paths by `<user>`.

    Args:
        variables: an environment; the values of its secret variables are known to be secret.
        homes: folders that become `~`.
        users: names that become `<user>` where they are a part of a path.
    """

    def __init__(self, variables: Mapping[str, str], homes: Iterable[str], users: Iterable[str]) -> None:
        self._known: set[str] = set()
        for name, value in variables.items():
            if is_secret_name(name, variable=True):
                self.learn(value)
        self._known_pattern: re.Pattern[str] | None = None
        self._homes = _alternatives(homes, before=r"(?<![\w.-])", after=r"(?![\w-])")
        self._users = _alternatives(users, before=r"(?<=[/\\])", after=r"(?![\w.-])")

    @classmethod
    def of_process(cls) -> Redactor:
        """For this process, its environment variables and its user."""
        home = Path.home()
        homes = {str(home), str(home.resolve())} - {"/"}
        users = {home.name} if str(home.parent) in ("/home", "/Users") else set[str]()
        with suppress(OSError, KeyError, ImportError):
            users.add(getpass.getuser())
        return cls(os.environ, homes, users)

    def learn(self, value: str) -> None:
        """Replace a value wherever it occurs from now on, each of its longer lines too."""
        lines = [line.strip() for line in value.splitlines()]
        for part in {value.strip(), *(line for line in lines if len(line) >= WHOLE_WORD_CHARS)}:
            if len(part) >= MIN_KNOWN_CHARS and part.lower() not in ("none", "null", "true", "false", SECRET):
                self._known.add(part)
        self._known_pattern = None

    def learn_tree(self, tree: JSON, secret: bool = False) -> None:
        """Learn every value that stands under a secret key, short plain words (`auth = "basic"`) excepted."""
        if isinstance(tree, Mapping):
            for key, value in tree.items():
                self.learn_tree(value, secret or is_secret_name(str(key)))
        elif isinstance(tree, list):
            for value in tree:
                self.learn_tree(value, secret)
        elif secret and isinstance(tree, str | int | float) and not _PLAIN_WORD.fullmatch(str(tree)):
            self.learn(str(tree))

    def learn_command(self, command: str) -> None:
        """Learn the secrets among the `key=value` arguments of a command line, those inside a value that is TOML included."""
        for argument in _arguments(command):
            key, equals, value = argument.partition("=")
            if equals:
                with suppress(tomllib.TOMLDecodeError):
                    self.learn_tree(tomllib.loads(f"value = {value}"), _is_secret_path(key))
                if _is_secret_path(key):
                    self.learn(value)

    def tree(self, tree: JSON, secret: bool = False) -> JSON:
        """A tree of the same structure without secrets."""
        if isinstance(tree, Mapping):
            return {self.shapes(str(key)): self.tree(value, secret or is_secret_name(str(key))) for key, value in tree.items()}
        if isinstance(tree, list):
            return [self.tree(value, secret) for value in tree]
        if tree is None or isinstance(tree, bool):
            return tree
        if secret or self._without_known(str(tree)) == SECRET:
            return SECRET
        return self.text(tree) if isinstance(tree, str) else tree

    def command(self, command: str) -> str:
        """A command line without secrets, each argument by itself."""
        kept: list[str] = []
        masked = False
        for argument in _arguments(command):
            key, equals, _ = argument.partition("=")
            clean = f"{key}={SECRET}" if equals and _is_secret_path(key) else self.text(argument)
            kept.append(SECRET if masked and not argument.startswith("-") else clean)
            masked = not equals and argument.startswith("-") and is_secret_name(argument)
        return shlex.join(kept) if kept else self.text(command)

    def text(self, text: str) -> str:
        """Words without secrets: those named beside their values, then `shapes`."""
        text = self._without_known(text)
        text = _HEADER.sub(rf"\1\2{SECRET}", text)
        text = _OPTION.sub(lambda m: f"{m[1]}{m[2]}{SECRET}" if is_secret_name(m[1]) else m[0], text)
        return self.shapes(_without_pairs(text, quoted_only=False))

    def code(self, line: str) -> str:
        """A line of source without the secrets that are written out in it: `token = tokens[0]` is none."""
        return self.shapes(_without_pairs(line, quoted_only=True))

    def shapes(self, text: str) -> str:
        """Any text without known secrets, what looks like a secret, and the user's folders."""
        text = _SHAPES.sub(SECRET, _BEARER.sub(rf"\1{SECRET}", self._without_known(text)))
        text = self._homes.sub("~", text) if self._homes else text
        return self._users.sub(USER, text) if self._users else text

    def _without_known(self, text: str) -> str:
        if self._known and self._known_pattern is None:
            long = _alternatives(s for s in self._known if len(s) >= WHOLE_WORD_CHARS)
            short = _alternatives((s for s in self._known if len(s) < WHOLE_WORD_CHARS), r"(?<![A-Za-z0-9])", r"(?![A-Za-z0-9])")
            self._known_pattern = re.compile("|".join(p.pattern for p in (long, short) if p is not None))
        return self._known_pattern.sub(SECRET, text) if self._known_pattern is not None else text


def _alternatives(values: Iterable[str], before: str = "", after: str = "") -> re.Pattern[str] | None:
    """Matches any of the values as Python, JSON, TOML and URLs spell them, the longest first."""
    spelled: set[str] = set()
    for value in filter(None, values):
        ascii_only, other = (json.dumps(value, ensure_ascii=flag)[1:-1] for flag in (True, False))
        spelled |= {value, ascii_only, other, repr(value)[1:-1], quote(value), quote(value, safe="")}
    if not spelled:
        return None
    return re.compile(f"{before}(?:{'|'.join(re.escape(value) for value in sorted(spelled, key=lambda s: (-len(s), s)))}){after}")


def _arguments(command: str) -> list[str]:
    """As a shell would split it; none where it could not."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def _is_secret_path(path: str) -> bool:
    """Whether a dotted key or a part of it is secret."""
    return any(is_secret_name(part) for part in path.split("."))


def _without_pairs(text: str, *, quoted_only: bool) -> str:
    """Replace the values of secret names in `name = value`, `"name": value` and the like; other values are looked into."""
    out: list[str] = []
    begin = 0
    while match := _PAIR.search(text, begin):
        secret = _is_secret_path(match[1]) and (match[3] is not None or not quoted_only)
        out.append(text[begin : match.end(2)])
        if secret:
            out.append(f'"{SECRET}"' if match[3] is not None else SECRET)
        begin = match.end() if secret else match.end(2)
    return "".join([*out, text[begin:]])
