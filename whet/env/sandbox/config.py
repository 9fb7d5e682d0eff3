"""The `[env.sandbox]` table."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from whet.config import Config, refuse_unread


class SandboxConfig(Config):
    """The place of tools of code, shell and files (docs/sandbox.md)."""

    kind: Literal["local", "docker", "fusion"] = "local"
    """local: processes of this machine, isolated as its kernel allows; docker: a container for each trajectory; fusion: a server of
    SandboxFusion's protocol."""
    at: str = ""
    """The image of docker's containers, which has python and sh (`python:3.12-slim`); or the address of the server (`http://HOST:8080`)."""
    unsafe: bool = False
    """Run without isolation where this machine allows none. What the model writes can then do all that you can."""
    timeout_s: float = Field(default=20.0, gt=0, le=3600)
    """Seconds after which a call is ended, which its answer says; less than `env.tool_timeout_s`."""
    memory_mb: int = Field(default=512, ge=64)
    """Memory of all processes of a call, in MiB."""
    max_processes: int = Field(default=64, ge=1)
    """Processes and threads of a call."""
    disk_mb: int = Field(default=64, ge=1)
    """Size of a trajectory's folder, in MiB. Where there are namespaces it is in memory."""
    paths: tuple[str, ...] = ()
    """Further files and folders of this machine that programs may read, by their full paths."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> SandboxConfig:
        if self.kind == "local":
            refuse_unread(self, ["at"], '(env.sandbox) with env.sandbox.kind="local"', "leave it out")
        else:
            refuse_unread(self, ["unsafe", "paths"], f"(env.sandbox) with env.sandbox.kind={self.kind!r}", "leave it out")
            if not self.at:
                what = "image (python:3.12-slim)" if self.kind == "docker" else "address (http://HOST:8080)"
                raise ValueError(f"env.sandbox.kind={self.kind!r} needs env.sandbox.at, the {what}")
        if self.kind == "fusion":
            refuse_unread(self, ["max_processes", "disk_mb"], "(env.sandbox) with a server, which has limits of its own", "leave it out")
        for path in self.paths:
            if not path.startswith("/") or path == "/":
                raise ValueError(f"env.sandbox.paths needs full paths below /, not {path!r}")
        return self
