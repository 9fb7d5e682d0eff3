"""Prometheus' text format (version 0.0.4): families of samples, read from texts, merged and written."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*)"\s*(,|$)')
SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?\s+(\S+)(?:\s+(-?\d+))?\s*')
COMMENT = re.compile(r"#\s*(HELP|TYPE)\s+(\S+)(?:\s(.*))?")
KINDS = ("counter", "gauge", "histogram", "summary", "untyped")
PARTS = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
"""Endings of the names of a family's samples."""
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
WORDS = {"nan": math.nan, "+inf": math.inf, "inf": math.inf, "-inf": -math.inf}

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ExposedSample:
    """A number under a name and labels."""

    name: str
    labels: Labels
    value: float
    timestamp_ms: int | None = None
    """Milliseconds since the epoch; None: it is of now."""


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of one name, kind and help text."""

    name: str
    kind: str
    """One of `KINDS`."""
    samples: tuple[ExposedSample, ...]
    help: str = ""


def gauge(name: str, help: str, values: Mapping[Labels, float]) -> Family:
    """A family of present values, by labels."""
    return Family(name, "gauge", tuple(ExposedSample(name, labels, value) for labels, value in values.items()), help)


def legal_name(name: str) -> str:
    """A metric's name in Prometheus: `reward/total` is `whet_reward_total`."""
    return "whet_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def parse(text: str) -> list[Family]:
    """The families of a text.

    Raises:
        ValueError: naming a line that is not of the format.
    """
    kinds: dict[str, str] = {}
    helps: dict[str, str] = {}
    samples: dict[str, list[ExposedSample]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if line.lstrip().startswith("#"):
            found = COMMENT.fullmatch(line.strip())
            if found is not None and found[1] == "HELP":
                helps[found[2]] = _unescaped(found[3] or "")
            elif found is not None:
                kind = (found[3] or "").strip()
                if kind not in KINDS or found[2] in kinds or NAME.fullmatch(found[2]) is None:
                    raise ValueError(f"line {number} is no type of a metric: {line[:200]!r}")
                kinds[found[2]] = kind
            continue
        sample = _sample(line, number)
        samples.setdefault(_family_of(sample.name, kinds), []).append(sample)
    return [Family(name, kinds.get(name, "untyped"), tuple(each), helps.get(name, "")) for name, each in samples.items()]


def labelled(families: Iterable[Family], name: str, value: str) -> list[Family]:
    """The families with one more label on every sample; a label that had its name becomes `exported_NAME`, as Prometheus has it."""

    def more(labels: Labels) -> Labels:
        return ((name, value), *((f"exported_{key}" if key == name else key, each) for key, each in labels))

    return [replace(f, samples=tuple(replace(sample, labels=more(sample.labels)) for sample in f.samples)) for f in families]


def merge(families: Iterable[Family]) -> list[Family]:
    """One family for each name, as the format demands. Of two samples of one name and labels the first stays, and so it does of two
    families of one name and different kinds."""
    out: dict[str, Family] = {}
    taken: set[tuple[str, Labels]] = set()
    for family in families:
        first = out.get(family.name)
        if first is not None and first.kind != family.kind:
            continue
        fresh: list[ExposedSample] = []
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels))
            if key not in taken:
                taken.add(key)
                fresh.append(sample)
        known = Family(family.name, family.kind, (), family.help) if first is None else first
        out[family.name] = replace(known, samples=(*known.samples, *fresh))
    return list(out.values())


def render(families: Iterable[Family]) -> str:
    """The text of families, each name of which is there once."""
    return "".join(line + "\n" for family in families if family.samples for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    if family.help:
        help = family.help.replace("\\", "\\\\").replace("\n", "\\n")
        yield f"# HELP {family.name} {help}"
    yield f"# TYPE {family.name} {family.kind}"
    for sample in family.samples:
        pairs = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels)
        braces = f"{{{pairs}}}" if pairs else ""
        when = "" if sample.timestamp_ms is None else f" {sample.timestamp_ms}"
        yield f"{sample.name}{braces} {_number(sample.value)}{when}"


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _sample(line: str, number: int) -> ExposedSample:
    found = SAMPLE.fullmatch(line.strip())
    if found is None:
        raise ValueError(f"line {number} is no sample: {line[:200]!r}")
    value = WORDS.get(found[3].lower())
    try:
        value = float(found[3]) if value is None else value
    except ValueError:
        raise ValueError(f"line {number} has no number: {line[:200]!r}") from None
    labels = _labels(found[2] or "", line, number)
    return ExposedSample(found[1], labels, value, None if found[4] is None else int(found[4]))


def _labels(text: str, line: str, number: int) -> Labels:
    labels: dict[str, str] = {}
    at = 0
    while at < len(text) and text[at:].strip():
        found = LABEL.match(text, at)
        if found is None or found[1] in labels:
            raise ValueError(f"line {number} has labels that cannot be read: {line[:200]!r}")
        labels[found[1]] = _unescaped(found[2])
        at = found.end()
    return tuple(labels.items())


def _family_of(name: str, kinds: Mapping[str, str]) -> str:
    """The family of a sample's name."""
    if name in kinds:
        return name
    for kind, endings in PARTS.items():
        for ending in endings:
            base = name.removesuffix(ending)
            if base != name and kinds.get(base) == kind:
                return base
    return name


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _unescaped(text: str) -> str:
    return re.sub(r"\\.", lambda found: ESCAPES.get(found[0], found[0]), text)
