"""Tools that servers listed when a run was built, kept from start to start."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from whet.env.base import EnvFactory
from whet.files import replace_file

RECORD = "mcp_tools.json"
"""File in a run's folder with the digest of each tool, by server and tool."""
_LISTED: dict[Callable[..., object], tuple[str, Mapping[str, str]]] = {}
"""Server and digests of its tools, by the function that opens its sessions."""


def note_listed(open: Callable[..., object], server: str, digests: Mapping[str, str]) -> None:
    """Note which tools a server listed, by the function that opens its sessions."""
    _LISTED[open] = (server, digests)


def listed_by(make: EnvFactory) -> dict[str, dict[str, str]]:
    """Digests of the tools that an environment has of servers, by server and tool."""
    found: dict[str, dict[str, str]] = {}
    for resource in make.needs.values():
        if resource.open in _LISTED:
            name, digests = _LISTED[resource.open]
            found.setdefault(name, {}).update(digests)
    return found


def record_tools(folder: Path, *makes: EnvFactory) -> list[str]:
    """Write the digests of tools of servers into a run's folder. Returns a sentence for each server that offers others than at the last
    start here."""
    now: dict[str, dict[str, str]] = {}
    for make in makes:
        for name, digests in listed_by(make).items():
            now.setdefault(name, {}).update(digests)
    if not now:
        return []
    path = folder / RECORD
    before: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    notes = [
        f"the MCP server {name} offers other tools than at the last start here: {words}"
        for name in now
        if name in before and (words := _differences(before[name], now[name]))
    ]
    replace_file(path, json.dumps({**before, **now}, indent=2, sort_keys=True) + "\n")
    return notes


def _differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    parts = [f"{name} is gone" for name in sorted(before.keys() - now.keys())]
    parts += [f"{name} is new" for name in sorted(now.keys() - before.keys())]
    parts += [f"{name} has another description or schema" for name in sorted(now) if name in before and before[name] != now[name]]
    return ", ".join(parts)
