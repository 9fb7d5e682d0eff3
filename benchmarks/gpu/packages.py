"""Which packages whet and its tests need that this Python lacks, and which wheels of a folder fill the gaps.

A package that is there in a version of the range is left as it is; torch and what comes with it are never replaced.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
TESTS = ("pytest", "pytest-timeout", "hypothesis", "peft")
"""Of the development packages, those that the tests of this check need."""
KEPT = ("torch", "triton", "transformers", "tokenizers", "numpy", "safetensors", "huggingface-hub")
"""Never installed: they are the machine's, and what is checked is that whet runs with them."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that this Python can install."""

    path: Path
    version: Version

    def requires(self) -> list[str]:
        with zipfile.ZipFile(self.path) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            return HeaderParser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []


@dataclass
class Found:
    """What is to be told, and done."""

    missing: list[dict[str, str]] = field(default_factory=list)
    """Packages that are neither there nor among the wheels: their names, ranges, and who needs them."""
    install: dict[str, str] = field(default_factory=dict)
    """Names and versions of wheels to install."""
    present: dict[str, str] = field(default_factory=dict)
    """Packages that are there in a version of the range."""


def wanted() -> list[Requirement]:
    """What whet needs, and its tests."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    tests = [text for text in project["optional-dependencies"]["dev"] if Requirement(text).name in TESTS]
    return [Requirement(text) for text in (*project["dependencies"], *tests)]


def wheels_in(folder: Path | None) -> dict[str, list[Wheel]]:
    """The wheels of a folder that this Python can install, newest first, by the packages' names."""
    tags, out = set(sys_tags()), dict[str, list[Wheel]]()
    for path in sorted(folder.glob("*.whl")) if folder is not None else ():
        name, number, _, found = parse_wheel_filename(path.name)
        if found & tags:
            out.setdefault(name, []).append(Wheel(path, number))
    return {name: sorted(wheels, key=lambda wheel: wheel.version, reverse=True) for name, wheels in out.items()}


def resolve(requirements: list[Requirement], wheels: dict[str, list[Wheel]]) -> Found:
    """Look for every requirement, and for those of the packages that are found."""
    found, seen = Found(), set[tuple[str, str, frozenset[str]]]()
    waiting = [(requirement, "whet") for requirement in requirements]
    while waiting:
        requirement, by = waiting.pop(0)
        name = canonicalize_name(requirement.name)
        key = name, str(requirement.specifier), frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        texts = _settle(requirement, name, by, wheels, found)
        waiting += [(each, name) for each in _that_apply(texts, requirement.extras)]
    return found


def _settle(requirement: Requirement, name: str, by: str, wheels: dict[str, list[Wheel]], found: Found) -> list[str]:
    """Decide where a package comes from; returns what it requires."""
    here = _version(name)
    if name not in found.install and here is not None and requirement.specifier.contains(here, prereleases=True):
        found.present[name] = here
        return requires(name) or []
    wheel = next((wheel for wheel in wheels.get(name, []) if requirement.specifier.contains(wheel.version, prereleases=True)), None)
    if wheel is None or name in KEPT:
        there = f"; {here} is here" if here is not None else ""
        found.missing.append({"name": name, "wanted": f"{requirement.specifier or 'any version'}{there}", "by": by})
        return []
    found.install[name] = str(wheel.version)
    found.present.pop(name, None)
    return wheel.requires()


def _that_apply(texts: list[str], extras: set[str]) -> Iterator[Requirement]:
    for text in texts:
        requirement = Requirement(re.sub(r"\s+", " ", text))
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description="packages that are missing")
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = resolve(wanted(), wheels_in(args.wheels))
    install = [f"{name}=={number}" for name, number in sorted(found.install.items())]
    args.out.write_text(json.dumps({"missing": found.missing, "install": install, "present": found.present}, indent=1) + "\n")


if __name__ == "__main__":
    main()
