"""The ways to isolate that this machine has, each as root, as another user, and with the rights of plain Docker."""

import asyncio
import os
import shutil
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.holder import HolderRefused, Launch
from whet.env.sandbox.local import LocalSandbox
from whet.env.sandbox.probe import rung_of

LESS = str(Path(__file__).with_name("less.py"))
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin")
SMALL = SandboxConfig(memory_mb=128, max_processes=16, disk_mb=4, timeout_s=20)
LAUNCHES = {"here": Launch(), "docker": Launch(before=(sys.executable, LESS, "docker"))}
if SYSTEM_PYTHON is not None:
    LAUNCHES["nobody"] = Launch(SYSTEM_PYTHON, (SYSTEM_PYTHON, LESS, "nobody"))
PLACES = ["here-namespaces", "here-landlock", "docker-landlock", "nobody-namespaces", "nobody-landlock"]


def rung(place):
    who, name = place.split("-")
    if sys.platform != "linux" or (who != "here" and os.geteuid() != 0) or who not in LAUNCHES:
        pytest.skip(f"needs Linux, root and a python3 of the system to try {place}")
    return rung_of(name, LAUNCHES[who])


@asynccontextmanager
async def opened(place, config=SMALL, **given):
    try:
        sandbox = await LocalSandbox.open(rung(place), config, **given)
    except HolderRefused as refused:
        pytest.skip(f"this machine has no {place}: {refused}")
    try:
        yield sandbox
    finally:
        await sandbox.close()


def play(place, *commands, config=SMALL, **given):
    """Run commands in one sandbox, one after the other."""

    async def run():
        async with opened(place, config, **given) as sandbox:
            return [await sandbox.exec(command) for command in commands]

    return asyncio.run(run())


def program(text):
    return ["python", "-I", "-S", "-c", text]
