"""Sandboxes from their settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from whet.env.base import EnvFactory
from whet.env.sandbox.base import Sandbox, SandboxFailed
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.docker import DockerSandbox
from whet.env.sandbox.fusion import FusionSandbox
from whet.env.sandbox.local import LocalSandbox
from whet.env.sandbox.probe import RECORD, Isolation, choose
from whet.files import replace_file
from whet.types import Task

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
        choice = await asyncio.to_thread(choose, unsafe=config.unsafe)
        sandbox: Sandbox = await LocalSandbox.open(choice.rung, config, paths=paths, loopback=loopback)
    elif paths or loopback is not None:
        raise SandboxFailed(f"a sandbox of the kind {config.kind!r} can be given no paths and no addresses of this machine")
    elif config.kind == "docker":
        sandbox = await DockerSandbox.open(config)
    else:
        sandbox = FusionSandbox(config)
    try:
        yield sandbox
    finally:
        await sandbox.close()


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

    _CONFIGS[sandbox] = config
    return _OPENERS.setdefault(key, sandbox)


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
