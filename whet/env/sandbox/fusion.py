"""Sandboxes on a server of SandboxFusion's protocol (`POST /run_code`).

The server keeps nothing between calls. A call brings the folder along as an archive and takes it back at its end.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from whet.env.sandbox.base import MAX_NAMES, OUTPUT_BYTES, READ_BYTES, Executed, PathRefused, SandboxFailed, encoded
from whet.env.sandbox.config import SandboxConfig
from whet.env.sandbox.docker import checked

ARCHIVE = "folder.tar"
MAX_ANSWER_BYTES = 64 << 20
ANSWER_S = 30.0
SHOWN_CHARS = 300
_SCRIPT = (
    "mkdir -p work new work/.tmp; [ -f {archive} ] && tar xf {archive} -C work; cp -R new/. work/; cd work\n"
    "{command}\nstatus=$?\ntar cf ../{archive} .; exit $status\n"
)


class FusionSandbox:
    """The client's side of one trajectory's folder."""

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._archive = b""
        """The folder as the last call left it."""
        self._new: dict[str, bytes] = {}
        """Files written since then."""
        self._turn = asyncio.Lock()

    async def exec(
        self, command: Sequence[str], stdin: bytes = b"", timeout_s: float | None = None, env: Mapping[str, str] | None = None
    ) -> Executed:
        limit_s = timeout_s or self._config.timeout_s
        named = [f"{name}={value}" for name, value in (env or {}).items()]
        async with self._turn:
            files = {f"new/{path}": encoded(content) for path, content in self._new.items()}
            if self._archive:
                files[ARCHIVE] = encoded(self._archive)
            body = {
                "language": "bash",
                "code": _SCRIPT.format(archive=ARCHIVE, command=shlex.join(["env", *named, *command])),
                "stdin": stdin.decode("utf-8", errors="replace"),
                "run_timeout": limit_s,
                "compile_timeout": limit_s,
                "memory_limit_MB": self._config.memory_mb,
                "files": files,
                "fetch_files": [ARCHIVE],
            }
            answer = await self._post(body, limit_s + ANSWER_S)
            self._take(answer.get("files") or {})
        return _executed(answer)

    async def read(self, path: str) -> bytes:
        checked(path)
        if path in self._new:
            return self._new[path]
        member = self._members().get(path)
        if member is None or not member.isfile():
            raise PathRefused(f"{path} is no ordinary file in the folder")
        if member.size > READ_BYTES:
            raise PathRefused(f"{path} has {member.size} bytes, and {READ_BYTES} can be read at most")
        with tarfile.open(fileobj=io.BytesIO(self._archive)) as archive:
            file = archive.extractfile(member)
            assert file is not None
            return file.read()

    async def write(self, path: str, content: bytes) -> None:
        self._new["/".join(part for part in checked(path).split("/") if part not in ("", "."))] = content

    async def list(self, path: str = ".") -> Sequence[str]:
        inside = "/".join(part for part in checked(path).split("/") if part not in ("", "."))
        names: set[str] = set()
        known = {name: member.isdir() for name, member in self._members().items()} | dict.fromkeys(self._new, False)
        for name, is_folder in known.items():
            if not inside or name.startswith(f"{inside}/"):
                first, _, more = name[len(inside) + bool(inside) :].partition("/")
                names.add(first + ("/" if more or is_folder else ""))
        return sorted(names - {".tmp/", "./", "", "/"})[:MAX_NAMES]

    async def close(self) -> None:
        self._archive, self._new = b"", {}

    def _members(self) -> dict[str, tarfile.TarInfo]:
        if not self._archive:
            return {}
        try:
            with tarfile.open(fileobj=io.BytesIO(self._archive)) as archive:
                return {member.name.removeprefix("./"): member for member in archive.getmembers()}
        except tarfile.TarError as error:
            raise SandboxFailed(f"the folder that the sandbox server gave back is no archive: {error}") from error

    def _take(self, files: Mapping[str, str]) -> None:
        """Keep the folder; of a call that was ended there is none, and it is as it was before."""
        if ARCHIVE in files:
            try:
                self._archive = base64.b64decode(files[ARCHIVE], validate=True)
            except (binascii.Error, TypeError) as error:
                raise SandboxFailed(f"the sandbox server gave files back that are no base64: {error}") from error
            self._new = {}

    async def _post(self, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        url = f"{self._config.at.rstrip('/')}/run_code"
        try:
            limit = aiohttp.ClientTimeout(total=timeout_s)
            async with aiohttp.ClientSession(timeout=limit) as session, session.post(url, json=body, allow_redirects=False) as response:
                content = bytearray()
                async for part in response.content.iter_chunked(1 << 16):
                    content += part
                    if len(content) > MAX_ANSWER_BYTES:
                        raise SandboxFailed(f"{url} answered with more than {MAX_ANSWER_BYTES} bytes")
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise SandboxFailed(f"{url} did not answer: {type(error).__name__}: {error}") from error
        shown = content[:SHOWN_CHARS].decode("utf-8", errors="replace")
        if response.status != 200:
            raise SandboxFailed(f"{url} answered {response.status}: {shown}")
        try:
            answer = json.loads(content)
            if answer["status"] == "SandboxError":
                raise SandboxFailed(f"{url}: {str(answer.get('message'))[:SHOWN_CHARS]}")
            assert answer["status"] in ("Success", "Failed") and isinstance(answer["run_result"], dict)
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            raise SandboxFailed(f"{url} answered with what is not of the protocol: {shown}") from error
        return answer


def _executed(answer: Mapping[str, Any]) -> Executed:
    """The outcome of a call, from the server's answer."""
    result = answer["run_result"]
    stdout, stderr = (str(result.get(name) or "") for name in ("stdout", "stderr"))
    seconds = float(result.get("execution_time") or 0.0)
    cut = [len(one) > OUTPUT_BYTES for one in (stdout, stderr)]
    ended = result.get("status") == "TimeLimitExceeded"
    status = result.get("return_code")
    if not ended and not isinstance(status, int):
        raise SandboxFailed(f"the sandbox server gave no status: {str(result)[:SHOWN_CHARS]}")
    kept = (stdout[:OUTPUT_BYTES], stderr[:OUTPUT_BYTES])
    return Executed(*kept, None if ended else status, "time" if ended else "exit", seconds, *cut)
