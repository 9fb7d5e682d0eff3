"""Tools over a trajectory's sandbox: python, shell, files. Each factory takes the settings of `env.sandbox`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal

from whet.env.resources import per_trajectory
from whet.env.sandbox.base import REASONS, Executed, Sandbox
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.open import opener

_NUMBERS = itertools.count(1)


def python(sandboxes: SandboxConfig) -> Callable[..., Any]:
    """A tool that runs Python programs."""
    opened = opener(sandboxes)

    async def python(code: str, sandbox: Sandbox = per_trajectory(opened)) -> str:
        """Runs a Python program and returns what it prints. Files that it writes into its folder stay for later calls; variables do not.

        Args:
            code: the program. Use print to see a result.
        """
        path = f".tmp/program_{next(_NUMBERS)}.py"
        await sandbox.write(path, code.encode("utf-8", errors="replace"))
        return summary(await sandbox.exec(["python", path], env={"PYTHONPATH": "."}))

    return python


def shell(sandboxes: SandboxConfig) -> Callable[..., Any]:
    """A tool that runs commands of a shell."""
    opened = opener(sandboxes)

    async def shell(command: str, sandbox: Sandbox = per_trajectory(opened)) -> str:
        """Runs a shell command and returns what it prints. Files that it writes into its folder stay for later calls.

        Args:
            command: the command, for sh.
        """
        return summary(await sandbox.exec(["sh", "-c", command]))

    return shell


def files(sandboxes: SandboxConfig) -> Callable[..., Any]:
    """A tool that reads and changes files."""
    opened = opener(sandboxes)

    async def files(
        action: Literal["read", "write", "list", "replace"],
        path: str = ".",
        text: str = "",
        old: str = "",
        sandbox: Sandbox = per_trajectory(opened),
    ) -> str:
        """Reads, writes and lists files, and replaces text in them.

        Args:
            action: read a file; write text to a file; list a folder; replace the text old, which is in the file once, by text.
            path: the file or folder, relative to the working folder.
            text: for write and replace, the new text.
            old: for replace, the text that is replaced.
        """
        if action == "list":
            return "\n".join(await sandbox.list(path)) or "(empty)"
        if action == "read":
            return (await sandbox.read(path)).decode("utf-8", errors="replace")
        if action == "replace":
            content = (await sandbox.read(path)).decode("utf-8")
            if not old or content.count(old) != 1:
                raise ValueError(f"the text to replace is in {path} {content.count(old) if old else 'an unsaid number of'} times, not once")
            text = content.replace(old, text)
        await sandbox.write(path, text.encode("utf-8", errors="replace"))
        return f"{path} has {len(text)} characters now"

    return files


def summary(done: Executed) -> str:
    """The outcome of a call, in words for the model."""
    parts = [done.stdout.rstrip("\n") + ("\n[more output was cut]" if done.stdout_cut else "")]
    if done.stderr.strip():
        parts.append(done.stderr.rstrip("\n") + ("\n[more of the error output was cut]" if done.stderr_cut else ""))
    if done.reason != "exit":
        parts.append(f"[{REASONS[done.reason]}, after {done.seconds:.1f} s]")
    elif done.status:
        parts.append(f"[exit status {done.status}]")
    return "\n".join(part for part in parts if part) or "[no output]"
