"""Sandboxes that are containers, by docker's command line."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from whet.env.sandbox.base import MAX_NAMES, OUTPUT_BYTES, READ_BYTES, Executed, PathRefused, SandboxFailed, text
from whet.env.sandbox.config import SandboxConfig

FOLDER = "/work"
START_S = 120.0
"""For a container to start; an image may have to be loaded."""
ANSWER_S = 30.0
FLOOD_BYTES = 32 << 20
"""Output after which a command is ended."""
DOCKER_FAILED = (125, 126)
"""Statuses by which docker says that it failed itself, or that the container has no such program."""
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_READ = 'test -f "$1" && test ! -L "$1" && head -c "$2" -- "$1"'
_LIST = 'ls -1Ap -- "$1" | head -n "$2"'
_END = "kill -9 -1"
"""Ends every process of the container that is the user's."""


class DockerSandbox:
    """A container without network, with a folder in memory. Calls of one container wait for each other, so that each can end all that it
    started."""

    def __init__(self, container: str, config: SandboxConfig) -> None:
        self._container, self._config = container, config
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, config: SandboxConfig) -> DockerSandbox:
        """Start a container.

        Raises:
            SandboxFailed: docker is not there, or cannot start it.
        """
        command = [
            "docker", "run", "--detach", "--rm", "--init", "--network", "none", "--read-only", "--cap-drop", "ALL",
            "--security-opt", "no-new-privileges", "--user", "65534:65534", "--pids-limit", str(config.max_processes + 8),
            "--memory", f"{config.memory_mb}m", "--memory-swap", f"{config.memory_mb}m", "--ulimit", "core=0",
            "--tmpfs", f"{FOLDER}:rw,exec,nosuid,nodev,mode=1777,size={config.disk_mb}m", "--workdir", FOLDER,
            "--env", f"HOME={FOLDER}", "--env", f"TMPDIR={FOLDER}/.tmp", "--env", "LANG=C.UTF-8", config.at, "sleep", "infinity",
        ]  # fmt: skip
        done = await bounded(command, b"", START_S)
        if done.status:
            raise SandboxFailed(f"docker could not start a container of {config.at}: {done.stderr.strip()[-500:] or done.status}")
        return cls(done.stdout.strip().splitlines()[-1], config)

    async def exec(
        self, command: Sequence[str], stdin: bytes = b"", timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> Executed:
        named = [part for name, value in (env or {}).items() for part in ("--env", f"{name}={value}")]
        async with self._turn:
            try:
                done = await bounded(self._exec(*command, options=named), stdin, timeout_s or self._config.timeout_s)
            finally:
                await asyncio.shield(bounded(self._exec("sh", "-c", _END), b"", ANSWER_S))
        if done.status in DOCKER_FAILED and "daemon" in done.stderr:
            raise SandboxFailed(f"docker could not run a call: {done.stderr.strip()[-500:]}")
        return done

    async def read(self, path: str) -> bytes:
        content = await self._file(_READ, path, str(READ_BYTES + 1))
        if len(content) > READ_BYTES:
            raise PathRefused(f"{path} has more than the {READ_BYTES} bytes that can be read at most")
        return content

    async def write(self, path: str, content: bytes) -> None:
        await self._file(_WRITE, path, given=content)

    async def list(self, path: str = ".") -> Sequence[str]:
        names = text(await self._file(_LIST, path, str(MAX_NAMES))).splitlines()
        return sorted(name for name in names if name != ".tmp/")

    async def close(self) -> None:
        await bounded(["docker", "kill", self._container], b"", ANSWER_S)

    def _exec(self, *command: str, options: Sequence[str] = ()) -> list[str]:
        return ["docker", "exec", "--interactive", "--workdir", FOLDER, *options, self._container, *command]

    async def _file(self, script: str, path: str, *more: str, given: bytes = b"") -> bytes:
        checked(path)
        parts: list[bytes] = []
        done = await bounded(self._exec("sh", "-c", script, "sh", f"./{path}", *more), given, ANSWER_S, parts, 2 * READ_BYTES)
        if done.reason != "exit":
            raise SandboxFailed(f"docker did not answer within {ANSWER_S:g} s")
        if done.status:
            raise PathRefused(f"{path}: {done.stderr.strip()[-300:] or 'there is no such file'}")
        return parts[0]


def checked(path: str) -> str:
    """A path that stays in the folder.

    Raises:
        PathRefused: it does not.
    """
    if path.startswith("/") or "\0" in path or ".." in path.split("/"):
        raise PathRefused(f"{path!r} is no path in the folder: paths are relative to it, without '..'")
    return path


async def bounded(
    command: Sequence[str], stdin: bytes, timeout_s: float, raw: list[bytes] | None = None, limit: int = OUTPUT_BYTES
) -> Executed:
    """Run a command of this machine's, and keep `limit` bytes of each output; `raw` gets those of the first one.

    Raises:
        SandboxFailed: it cannot be started.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise SandboxFailed(f"{command[0]} cannot be started: {error}") from error
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    kept = [bytearray(), bytearray()]
    seen = [0, 0]
    reason = "exit"
    try:
        async with asyncio.timeout(timeout_s):
            outputs = [_keep(one, kept[index], seen, index, limit) for index, one in enumerate((process.stdout, process.stderr))]
            await asyncio.gather(_feed(process.stdin, stdin), *outputs)
            await process.wait()
    except TimeoutError:
        reason = "time"
    except OverflowError:
        reason = "output"
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if raw is not None:
        raw.append(bytes(kept[0]))
    status = process.returncode if reason == "exit" else None
    return Executed(text(bytes(kept[0])), text(bytes(kept[1])), status, reason, loop.time() - began, seen[0] > limit, seen[1] > limit)


async def _feed(writer: asyncio.StreamWriter, content: bytes) -> None:
    with suppress(ConnectionError):
        writer.write(content)
        await writer.drain()
    writer.close()


async def _keep(reader: asyncio.StreamReader, kept: bytearray, seen: list[int], index: int, limit: int) -> None:
    while part := await reader.read(1 << 16):
        kept += part[: max(0, limit - len(kept))]
        seen[index] += len(part)
        if seen[index] > FLOOD_BYTES:
            raise OverflowError("too much output")
