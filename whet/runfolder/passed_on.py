"""Filter for the part of a run's texts that may leave the machine: the texts of whet's own source.
Everything else becomes its type and its length."""

from __future__ import annotations

import builtins
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from whet.runfolder.own_source import Sentence, own_source
from whet.types import JSON

MAX_LINE_CHARS = 4000
"""Characters of a line that are examined."""
MAX_LINES = 200
"""Lines of a text that are examined."""
_DEPTH = 3
"""A gap of a sentence may hold a sentence, so often."""
_MAX_DEPTH = 12
_THREAD = re.compile(r"(?:Current thread|Thread) .*\(most recent call first\):")
_HEADER = re.compile(r'[ |+]*File "([^"\n]+)", line (\d+),? in ([\w.<>]+)')
_BETWEEN = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_KIND = re.compile(r"(?:[a-z_]+\.)*((?:[A-Z][a-z]+){1,5}(?:Error|Exception|Interrupt|Exit|Group))")
_NUMBER = re.compile(r"[-+]?\d{1,12}(?:\.\d{1,9})?(?:[eE][-+]?\d{1,3})?(?:%|s|h|m|/\d{1,12})?|nan|inf")
_STEP = re.compile(r"step +\d{1,12}/\d{1,12}(?:  .*)?")


def blank(value: object) -> str:
    """The type and length that stand for a value."""
    if isinstance(value, Mapping):
        return f"<table of {len(value)}>"
    if isinstance(value, list):
        return f"<list of {len(value)}>"
    return "<number>" if isinstance(value, int | float) else f"<text of {len(str(value))} characters>"


def settings(table: Mapping[str, JSON], depth: int = _MAX_DEPTH) -> dict[str, JSON]:
    """A table of settings: declared keys with their numbers, true and false, and words that whet's source has."""
    return _table(table, lambda key, value: _setting(key, value, depth - 1))


def _setting(key: str, value: JSON, depth: int) -> JSON:
    known = own_source()
    if key not in known.keys or (isinstance(value, Mapping | list) and not depth):
        return blank(value)
    if isinstance(value, Mapping):
        if key in known.free_keys:  # the keys are the user's: no type describes their values
            return _table(value, lambda _, inner: inner if isinstance(inner, bool) else blank(inner))
        if key in known.named_keys:
            return _table(value, lambda _, inner: settings(inner, depth - 1) if isinstance(inner, Mapping) else blank(inner))
        return settings(value, depth)
    if isinstance(value, list):
        return [settings(each, depth - 1) if isinstance(each, Mapping) else _setting(key, each, depth - 1) for each in value]
    if isinstance(value, str):
        return value if value in known.words else blank(value)
    passes = value is None or isinstance(value, bool) or (isinstance(value, int | float) and key in known.number_keys)
    return value if passes else blank(value)


def _table(table: Mapping[str, JSON], clean: Callable[[str, JSON], JSON]) -> dict[str, JSON]:
    """Keys that are no declared ones become their length."""
    out: dict[str, JSON] = {}
    for key, value in table.items():
        out[fresh(str(key) if key in own_source().keys else f"<key of {len(str(key))} characters>", out)] = clean(str(key), value)
    return out


def fresh(name: str, taken: Mapping[str, JSON]) -> str:
    """A name that is not taken yet."""
    if name not in taken:
        return name
    number = next(n for n in range(2, len(taken) + 3) if f"{name} ({n})" not in taken)
    return f"{name} ({number})"


def name(text: str) -> str:
    """A name that is made of whet's words and numbers, such as a metric's or a file's; else its length for each part of it."""
    return "/".join(part if _is_name(part) else blank(part) for part in text.split("/"))


def _is_name(part: str) -> bool:
    """Digits come after a word, but for two of them."""
    words = own_source().words
    if part in words:
        return True
    found = [each for each in re.split(r"(\d+)|[._-]+", part) if each]
    return bool(found) and all(each in words or (each.isdigit() and (place > 0 or len(each) < 3)) for place, each in enumerate(found))


def named(table: Mapping[str, JSON]) -> dict[str, JSON]:
    """The numbers of a table, by their names."""
    out: dict[str, JSON] = {}
    for key, value in table.items():
        if value is None or isinstance(value, int | float):
            out[fresh(name(str(key)), out)] = value
    return out


def kind(text: JSON) -> str:
    """The name of an exception's type: one of Python's or whet's, or words that end as such names do."""
    short = str(text)
    if short in own_source().classes:
        return short
    found = getattr(builtins, short, None)
    if isinstance(found, type) and issubclass(found, BaseException):
        return short
    return short if len(short) <= 60 and _KIND.fullmatch(short) else blank(short)


def command(text: str) -> str:
    """A command line: whet's commands and options, and `key=value` of settings; else an argument's length."""
    try:
        arguments = shlex.split(text)
    except ValueError:
        return blank(text)
    return " ".join(_argument(each, place) for place, each in enumerate(arguments))


def _argument(text: str, place: int) -> str:
    key, equals, value = text.partition("=")
    known = own_source()
    if equals and all(part in known.keys for part in key.split(".")):
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value
        cleaned = blank(parsed) if set(key.split(".")[:-1]) & known.free_keys else _setting(key.split(".")[-1], parsed, _MAX_DEPTH)
        shown = cleaned if isinstance(cleaned, str | int | float) else blank(cleaned)
        return f"{key}={str(shown).lower() if isinstance(shown, bool) else shown}"
    option = text.removeprefix("--").replace("-", "_") if text.startswith("--") else text
    return text if option in known.words and (place < 3 or option != text) else blank(text)


def words(text: str) -> str:
    """whet's own text in lines of text: its sentences with the gaps blank, steps, and rows of tables
    that begin with a word of its own."""
    first, more = text.split("\n")[:MAX_LINES], text.count("\n") + 1 - MAX_LINES
    return "\n".join([*map(_line, first), *([f"<{more} lines more>"] if more > 0 else [])])


@lru_cache(maxsize=4096)
def _line(line: str) -> str:
    bare = line.strip()
    indent = line[: len(line) - len(line.lstrip())]
    if not bare or len(line) > MAX_LINE_CHARS:
        return blank(line) if bare else ""
    if _STEP.fullmatch(bare):
        return indent + "  ".join(_cells(bare))
    first, *more = re.split(r" {2,}", bare)
    if indent and more and _is_name(first) and not _NUMBER.fullmatch(first):
        return indent + "  ".join([name(first), *(each if _NUMBER.fullmatch(each) else name(each) for each in more)])
    return indent + (_sentence(bare) or blank(bare))


def _cells(line: str) -> list[str]:
    """The parts of a step's line: labels and numbers."""

    def passed(part: str) -> str:
        bare = part.strip("(),")
        return part if _NUMBER.fullmatch(bare) or _is_name(bare) else blank(part)

    return [" ".join(map(passed, part.split())) for part in re.split(r" {2,}", line)]


def _sentence(text: str, depth: int = _DEPTH) -> str | None:
    """The sentence of whet's that a text is, with its gaps blank; None: it is none."""
    known = own_source().sentences
    found: tuple[int, str] | None = None
    for word in dict.fromkeys(re.findall(r"[A-Za-z]{2,}", text)):
        for sentence in known.get(word, ()):
            size = sum(map(len, sentence))
            if (found is None or size > found[0]) and (gaps := _gaps(sentence, text)) is not None:
                found = size, "".join([sentence[0], *(_gap(gap, depth) + part for gap, part in zip(gaps, sentence[1:], strict=True))])
    return None if found is None else found[1]


def _gaps(sentence: Sentence, text: str) -> list[str] | None:
    """Texts in the gaps of a sentence, each as short as possible; None: the text is another."""
    first, last = sentence[0], sentence[-1]
    if len(sentence) == 1:
        return [] if text == first.strip() else None
    if not text.startswith(first) or not text.endswith(last) or len(text) < len(first) + len(last):
        return None
    gaps: list[str] = []
    at, end = len(first), len(text) - len(last)
    for part in sentence[1:-1]:
        place = text.find(part, at, end)
        if place < 0:
            return None
        gaps.append(text[at:place])
        at = place + len(part)
    return [*gaps, text[at:end]]


def _gap(text: str, depth: int) -> str:
    known = own_source()
    bare = text.strip("'\"")
    if not text or bare in known.keys or bare in known.choices or ("." in bare and _is_name(bare)) or kind(bare) == bare:
        return text
    inner = _sentence(text, depth - 1) if depth else None
    if inner is not None:
        return inner
    parts = ["<number>" if _NUMBER.fullmatch(part) else part for part in bare.split(" ")]
    return " ".join(parts) if all(part == "<number>" or part in known.keys for part in parts) else blank(text)


def frames(lines: Sequence[str]) -> list[str]:
    """The frames of a traceback that are in whet, the types of its exceptions, and how many frames are elsewhere."""
    out: list[str] = []
    elsewhere = 0
    for line in [*lines, None]:
        frame = None if line is None else _HEADER.fullmatch(line)
        place = None if frame is None else _own_place(frame[1], frame[2], frame[3])
        if frame is not None and place is None:
            elsewhere += 1
            continue
        note = place or (None if line is None else _between(line))
        if elsewhere and (note is not None or line is None):
            out.append(f"  outside whet: {elsewhere}")
            elsewhere = 0
        if note is not None:
            out.append(note)
    return out


def _between(line: str) -> str | None:
    """A line between frames, if it is known: words of Python's, the types of exceptions, the begin of a
    thread."""
    if line in _BETWEEN:
        return line
    if _THREAD.fullmatch(line):
        return "A thread, its last call first:"
    return kind(line) if _KIND.fullmatch(line) or kind(line) == line else None


def _own_place(path: str, line: str, function: str) -> str | None:
    _, _, inside = path.replace("\\", "/").rpartition("/whet/")
    known = own_source()
    if inside not in known.files or len(line) > 6:
        return None
    shown = function if (inside, function) in known.functions or function == "<module>" else "<name>"
    return f"  whet/{inside}, line {line}, in {shown}"
