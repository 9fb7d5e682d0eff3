"""Sandboxes from their settings."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from whet.env.base import EnvFactory
from whet.env.sandbox.base import Sandbox, SandboxFailed, SandboxRefused
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.docker import DockerSandbox
from whet.env.sandbox.fusion import FusionSandbox
from whet.env.sandbox.inside import landlock
from whet.env.sandbox.local import LocalSandbox
from whet.env.sandbox.needed import needed_by
from whet.env.sandbox.probe import RECORD, Isolation, choose
from whet.files import replace_file
from whet.types import Task

Opener = TypeVar("Opener", bound=Callable[..., Any])
_OPENERS: dict[str, Callable[[Task], AbstractAsyncContextManager[Sandbox]]] = {}
"""Resources that open sandboxes, by their settings."""
_CONFIGS: dict[Callable[..., object], SandboxConfig] = {}
"""Settings of the resources that open sandboxes."""


@asynccontextmanager
async def open_sandbox(
    config: SandboxConfig, task: Task | None = None, *, paths: Sequence[str] = (), loopback: tuple[str, int] | None = None
) -> AsyncIterator[Sandbox]:
    """A sandbox that lives as long as the context.

    Args:
        config: its kind and limits.
        task: the prompt that it is for.
        paths: files and folders of this machine that its programs may read, in addition to those of the settings.
        loopback: host and port that its programs reach as `127.0.0.1`, at the same port; None: no network at all.

    Raises:
        SandboxRefused: nothing on this machine isolates as it must.
        SandboxFailed: it cannot be opened.
    """
    if config.kind == "local":
        async with open_local(config, paths=paths, loopback=loopback) as local:
            yield local
        return
    if paths or loopback is not None:
        raise SandboxFailed(f"a sandbox of the kind {config.kind!r} can be given no paths and no addresses of this machine")
    sandbox: Sandbox = await DockerSandbox.open(config) if config.kind == "docker" else FusionSandbox(config)
    try:
        yield sandbox
    finally:
        await sandbox.close()


@asynccontextmanager
async def open_local(
    config: SandboxConfig, *, paths: Sequence[str] = (), loopback: tuple[str, int] | None = None
) -> AsyncIterator[LocalSandbox]:
    """A sandbox of this machine, in which programs may live on. See `open_sandbox`."""
    choice = await asyncio.to_thread(choose, unsafe=config.unsafe)
    sandbox = await LocalSandbox.open(choice.rung, config, paths=paths, loopback=loopback)
    try:
        yield sandbox
    finally:
        await sandbox.close()


def for_command(
    config: SandboxConfig, command: Sequence[str], environment: Mapping[str, str], *, network: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A command of the settings as a sandbox runs it, and the paths that its sandbox is to be given: see `needed_by`.

    Args:
        config: the sandbox's settings.
        command: a program and its arguments.
        environment: the program's variables.
        network: it is given an address.

    Raises:
        SandboxRefused: nothing on this machine isolates as it must, or not such a command.
        ValueError: the sandbox is none of this machine, or there is no such program.
    """
    if config.kind != "local":
        raise ValueError(f"commands of the settings run in sandboxes of this machine, not in those of env.sandbox.kind={config.kind!r}")
    choice = choose(unsafe=config.unsafe)
    whole, paths = needed_by(command, environment)
    if choice.rung.name == "landlock":
        if network and landlock.version() < landlock.WITH_PORTS:
            raise SandboxRefused(f"the kernel's Landlock (version {landlock.version()}) cannot open one port alone; Linux 6.7 can")
        if os.geteuid() == 0 and (closed := [path for path in paths if not _readable_to_all(Path(path))]):
            raise SandboxRefused(f"programs in the sandbox have a user of their own, who cannot reach {closed[0]} (chmod o+rx its folders)")
    return whole, paths


def _readable_to_all(path: Path) -> bool:
    """True if every user can read a file, or list a folder."""
    needed = stat.S_IROTH | stat.S_IXOTH if path.is_dir() else stat.S_IROTH
    return os.stat(path).st_mode & needed == needed and all(os.stat(one).st_mode & stat.S_IXOTH for one in path.parents)


def isolating(open: Opener, config: SandboxConfig) -> Opener:
    """Note that a resource opens sandboxes, so that the run tells how they isolate. Returns the resource's function."""
    _CONFIGS[open] = config
    return open


def opener(config: SandboxConfig) -> Callable[[Task], AbstractAsyncContextManager[Sandbox]]:
    """The resource of a trajectory that opens its sandbox: the same one for equal settings, so that tools share it.

    Raises:
        SandboxRefused: nothing on this machine isolates as it must.
    """
    if config.kind == "local":
        choose(unsafe=config.unsafe)
    key = config.model_dump_json()
    if key in _OPENERS:
        return _OPENERS[key]

    def sandbox(task: Task) -> AbstractAsyncContextManager[Sandbox]:
        return open_sandbox(config, task)

    return _OPENERS.setdefault(key, isolating(sandbox, config))


def chosen(make: EnvFactory) -> Isolation | None:
    """The isolation of an environment's sandboxes; None: it has none on this machine."""
    configs = [_CONFIGS[resource.open] for resource in make.needs.values() if resource.open in _CONFIGS]
    return choose(unsafe=configs[0].unsafe) if configs and configs[0].kind == "local" else None


def record_isolation(folder: Path, *makes: EnvFactory) -> None:
    """Write `sandbox.json` into a run's folder, if one of its environments has sandboxes on this machine."""
    for choice in (found for make in makes if (found := chosen(make)) is not None):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / RECORD, json.dumps(choice.to_dict(), indent=2) + "\n")
        return
