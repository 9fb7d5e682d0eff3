"""Servers' own checksums of their parameters, which the trainer cannot compute: compared between servers, and from version to version.

Servers of one layout that hold the same weights agree, and a parameter whose weights changed has another checksum. That is no comparison
with the trainer: servers that all hold the same wrong weights agree, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from whet.engine.base import EngineFailed
from whet.engine.layout import FUSED
from whet.types import Receipt

SHOWN = 5
"""Parameters that an error names."""


def check_agreement(servers: Mapping[str, Mapping[str, str]]) -> None:
    """Compare the checksums of servers of one layout: those that name the same parameters in the same processes.

    Args:
        servers: checksums by process and parameter (`Receipt.checksums`), by the server's name.

    Raises:
        EngineFailed: if two of them differ; it names the servers and the parameters.
    """
    first_of: dict[frozenset[str], str] = {}
    for name, found in servers.items():
        first = first_of.setdefault(frozenset(found), name)
        if wrong := [key for key, checksum in found.items() if servers[first][key] != checksum]:
            raise EngineFailed(f"{name} and {first} hold other weights than each other, by their own checksums: {listed(wrong)}")


class ChecksumHistory:
    """Checksums of the last version, and what was sent of it."""

    def __init__(self) -> None:
        self._sent: Mapping[str, str] = {}
        self._servers: Mapping[str, Mapping[str, str]] = {}

    def check(self, answers: Sequence[Receipt], sent: Mapping[str, str], dtype: str) -> None:
        """Compare what servers tell of a version.

        A server that holds weights in another type may round a change away, so that only an update of which nothing arrived is found there.

        Args:
            answers: the servers' receipts.
            sent: the trainer's digests of what was sent, by its names in Hugging Face files.
            dtype: type of what was sent.

        Raises:
            EngineFailed: if servers of one layout disagree, or a parameter is as before though its weights changed.
        """
        servers = {answer.engine: answer.checksums for answer in answers if answer.checksums is not None}
        exact = {answer.engine for answer in answers if answer.dtype == dtype}
        check_agreement(servers)
        changed = {name for name, digest in sent.items() if self._sent.get(name, digest) != digest}
        for engine, found in servers.items():
            before = self._servers.get(engine, {})
            if before.keys() != found.keys():
                continue
            due = {parameter for parameter in map(parameter_of, found) if not changed.isdisjoint(files_of(parameter))}
            stale = due - {parameter_of(key) for key, checksum in found.items() if before[key] != checksum}
            if stale and (engine in exact or stale == due):
                words = "holds weights as they were before, by its own checksums, though they changed"
                raise EngineFailed(f"{engine} {words}: {listed(stale)}")
        self._sent, self._servers = dict(sent), servers


def parameter_of(key: str) -> str:
    """Name of the parameter in a key of `Receipt.checksums`."""
    return key.rpartition(":")[2]


def files_of(parameter: str) -> set[str]:
    """Names in Hugging Face files of the weights that a server's parameter is put together from, where that is a dense model's."""
    module, _, kind = parameter.rpartition(".")
    stem, _, last = module.rpartition(".")
    return {f"{stem}.{part}.{kind}" for part in FUSED.get(last, (last,))} if stem else {parameter}


def listed(names: Iterable[str]) -> str:
    """The first of some names, and the number of the others."""
    every = sorted(names)
    return ", ".join(every[:SHOWN]) + (f" and {len(every) - SHOWN} more" if len(every) > SHOWN else "")
