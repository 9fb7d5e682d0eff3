"""The choice of a way to isolate programs on this machine, by trying to get out of it."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import platform
import shutil
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.env.sandbox.base import SandboxFailed, SandboxRefused
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.holder import Launch
from whet.env.sandbox.inside import landlock
from whet.env.sandbox.local import LocalSandbox, Rung
from whet.types import JSON

RUNGS = ("namespaces", "landlock")
"""Ways to isolate, the better one first."""
PROBE = SandboxConfig(memory_mb=128, max_processes=16, disk_mb=4, timeout_s=30)
"""Limits of the self-test."""
ATTEMPTS = (Path(__file__).parent / "inside/attempts.py").read_text()
PROBE_S = 120.0
RECORD = "sandbox.json"
"""File in a run's folder that says how its sandboxes isolate."""
VARIABLES = ("PATH", "HOME", "TMPDIR", "LANG", "PYTHONDONTWRITEBYTECODE", "LC_CTYPE", "PWD")
"""Variables that a command may have; python and sh make the last two themselves."""


@dataclass(frozen=True, slots=True)
class Isolation:
    """A way to isolate, and why it is this one."""

    rung: Rung
    found: Mapping[str, Mapping[str, str]]
    """Result of the self-test by rung: the attempts and what refused each, nothing where it succeeded; `fault`, if it cannot be made."""

    def summary(self) -> str:
        """The choice in one line, for people."""
        if self.rung.name == "unsafe":
            return "programs run without isolation (env.sandbox.unsafe): they can do all that you can"
        attempts = self.found[self.rung.name]
        worse = [f"; {name}: {_fault_of(found)}" for name, found in self.found.items() if name != self.rung.name]
        return f"{self.rung.name}, Linux {platform.release()}: {len(attempts)} attempts to get out were refused{''.join(worse)}"

    def to_dict(self) -> dict[str, JSON]:
        """The choice, the kernel's facts, and the self-test's results."""
        return {
            "rung": self.rung.name,
            "python": self.rung.python,
            "kernel": kernel_facts(),
            "attempts": {name: dict(found) for name, found in self.found.items()},
        }


def kernel_facts() -> dict[str, JSON]:
    """Facts that decide how this machine isolates."""
    facts: dict[str, JSON] = {"release": platform.release(), "machine": platform.machine(), "landlock": landlock.version()}
    facts["root"] = os.geteuid() == 0
    for name in ("user/max_user_namespaces", "kernel/unprivileged_userns_clone", "kernel/apparmor_restrict_unprivileged_userns"):
        path = Path("/proc/sys") / name
        if path.exists():
            facts[path.name] = int(path.read_text())
    return facts


@functools.cache
def choose(*, unsafe: bool = False, launch: Launch | None = None) -> Isolation:
    """The best way to isolate that withstands the self-test. It takes about a second, once in a process.

    Args:
        unsafe: where none does, run without.
        launch: how sandboxes' processes are started.

    Raises:
        SandboxRefused: nothing isolates as it must.
    """
    return _on_thread(_choose(unsafe, launch or Launch()))


async def _choose(unsafe: bool, launch: Launch) -> Isolation:
    found: dict[str, Mapping[str, str]] = {}
    for name in RUNGS if sys.platform == "linux" else ():
        try:
            rung = rung_of(name, launch)
            found[name] = await attempts(rung)
        except SandboxFailed as error:
            found[name] = {"fault": str(error)}
        else:
            if all(found[name].values()):
                return Isolation(rung, found)
    if unsafe:
        return Isolation(rung_of("unsafe", launch), found)
    raise SandboxRefused(refusal(found))


def refusal(found: Mapping[str, Mapping[str, str]]) -> str:
    """The text about all that is missing, with remedies."""
    lines = [f"  {name}: {_fault_of(one)}" for name, one in found.items()] or ["  there is none but on Linux"]
    return "\n".join([
        "env.sandbox: nothing on this machine isolates programs as it must:",
        *lines,
        "run on a machine or in a container that allows user namespaces or Landlock (Linux 5.13; as another user than root 6.12), choose "
        'env.sandbox.kind="docker" or "fusion", or set env.sandbox.unsafe=true, which runs what the model writes with all your rights',
    ])  # fmt: skip


def _fault_of(found: Mapping[str, str]) -> str:
    if "fault" in found:
        return found["fault"]
    return f"the self-test got through by {', '.join(name for name, refused in found.items() if not refused)}"


def rung_of(name: str, launch: Launch) -> Rung:
    """A rung with the interpreter that its programs can run.

    Raises:
        SandboxFailed: they can run none.
    """
    base = Path(os.path.realpath(launch.python))
    if name == "landlock" and os.geteuid() == 0 and not _open_to_all(base):  # its programs have another user, and the same files
        other = shutil.which("python3", path="/usr/local/bin:/usr/bin")
        if other is None:
            raise SandboxFailed(f"other users cannot run {base}, and there is no other python3: open its folders (chmod o+rx)")
        return Rung(name, other, (), launch)
    return Rung(name, str(base), (sys.base_prefix,) if launch.python == sys.executable else (), launch)


def _open_to_all(path: Path) -> bool:
    """True if every user can run a file."""
    return all(os.stat(one).st_mode & stat.S_IXOTH for one in (path, *path.parents))


async def attempts(rung: Rung) -> dict[str, str]:
    """Try to get out of a sandbox: by attempt, what refused it, or nothing where it succeeded.

    Raises:
        SandboxFailed: there can be no such sandbox, or the attempts could not be made.
    """
    with _targets() as targets:
        sandbox = await LocalSandbox.open(rung, PROBE)
        try:
            found: dict[str, str] = json.loads(await _output(sandbox, "escapes", json.dumps(targets)))
            forks = await _output(sandbox, "forks", str(PROBE.max_processes))
            most = 2 * PROBE.memory_mb
            memory = await _output(sandbox, "memory", str(most))
        finally:
            await sandbox.close()
    found["forks"] = "" if forks.isdecimal() and int(forks) > PROBE.max_processes else f"ended at {forks.strip() or 'the limit'}"
    found["memory"] = "" if memory.isdecimal() and int(memory) >= most else f"ended at {memory.strip() or 'the limit'}"
    return found


async def _output(sandbox: LocalSandbox, *arguments: str) -> str:
    done = await sandbox.exec(["python", "-I", "-S", "-", *arguments], ATTEMPTS.encode())
    if done.reason in ("memory", "processes"):
        return ""
    if done.status:
        raise SandboxFailed(f"the self-test could not run ({arguments[0]}): {done.stderr.strip()[-300:] or done.status}")
    return done.stdout.strip()


@contextmanager
def _targets() -> Iterator[dict[str, Any]]:
    """Things outside of the sandbox that every user of this machine may use."""
    with tempfile.TemporaryDirectory(prefix="whet-probe-") as folder:
        os.chmod(folder, 0o777)
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        secret.chmod(0o644)
        tcp, udp = socket.socket(socket.AF_INET), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        unix, abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        name = f"whet-probe-{os.getpid()}-{threading.get_ident()}"
        with tcp, udp, unix, abstract:
            tcp.bind(("127.0.0.1", 0))
            udp.bind(("127.0.0.1", 0))
            unix.bind(f"{folder}/unix")
            os.chmod(f"{folder}/unix", 0o777)
            abstract.bind("\0" + name)
            for one in (tcp, unix, abstract):
                one.listen(8)
            ports = {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
            places = {"secret": str(secret), "open": folder, "unix": f"{folder}/unix", "abstract": name}
            yield {**ports, **places, "pid": os.getpid(), "env": VARIABLES}


def _on_thread(work: Any) -> Any:
    """Result of a coroutine, run in an event loop of its own: the caller's may be running."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append((asyncio.run(asyncio.wait_for(work, PROBE_S)), None))
        except Exception as error:  # raised by the caller
            results.append((None, error))

    thread = threading.Thread(target=run, name="sandbox-probe", daemon=True)
    thread.start()
    thread.join()
    result, error = results[0]
    if error is not None:
        raise error
    return result
