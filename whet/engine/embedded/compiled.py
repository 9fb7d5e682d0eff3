"""What is compiled of decoding: decode.c and draw.c, built with the C compiler at hand, once for each version and each processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from whet.runfolder.child_environment import child_environment

SOURCES = tuple(Path(__file__).with_name(name) for name in ("decode.c", "draw.c"))
HEADER = Path(__file__).with_name("vectors.h")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
BUILD_LIMIT_S = 60


class NotCompiled(Exception):
    """There is no compiled step; the text says why."""


class Step(ctypes.Structure):
    """`struct step` of decode.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num", "layers", "hidden", "heads", "kv_heads", "dim", "inner")),
        *((name, ctypes.c_int64) for name in ("block_size", "table_width", "longest", "threads")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        *((name, ctypes.c_void_p) for name in ("embed", "final_norm", "tensors", "tokens", "lengths", "tables")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "out", "scratch")),
    ]


class Logits(ctypes.Structure):
    """`struct logits` of decode.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num", "hidden", "vocab", "threads")),
        *((name, ctypes.c_void_p) for name in ("states", "head", "bias", "out")),
    ]


class Draw(ctypes.Structure):
    """`struct draw` of draw.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num", "vocab")),
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "noise", "sums", "tokens", "logprobs")),
    ]


@cache
def library() -> ctypes.CDLL:
    """The functions of `SOURCES`. A build takes about a second; later processes find it in the user's cache folder.

    Raises:
        NotCompiled: without a compiler, or if it fails.
    """
    path = _folder() / f"decode-{_fingerprint()}.so"
    if not path.exists():
        _build(path)
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise NotCompiled(f"{path} cannot be loaded ({error}); delete it, and it is built anew") from error
    for name, takes in (("decode_step", Step), ("decode_logits", Logits), ("draw_tokens", Draw)):
        function = getattr(found, name)
        function.argtypes, function.restype = [ctypes.POINTER(takes)], None
    found.decode_scratch_floats.argtypes = [ctypes.POINTER(Step)]
    found.decode_scratch_floats.restype = ctypes.c_int64
    return found


def compiler() -> list[str]:
    """The C compiler's command: CC, or the first of cc, gcc and clang that is installed.

    Raises:
        NotCompiled: if there is none.
    """
    asked = shlex.split(os.environ.get("CC", ""))
    for command in [asked] if asked else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise NotCompiled(f"there is no C compiler ({' '.join(asked) or 'cc, gcc or clang'}); install one, or name it in CC")


def _build(path: Path) -> None:
    """Build into place, whoever else may be doing the same."""
    command = compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            line = [*command, *FLAGS, "-o", str(made), *map(str, SOURCES), "-lm"]
            done = subprocess.run(line, capture_output=True, text=True, timeout=BUILD_LIMIT_S, env=child_environment())
            if done.returncode:
                raise NotCompiled(f"{' '.join(command)} cannot build {_names()}: {_first_error(done.stderr)}")
            os.replace(made, path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{_names()} were not built into {path.parent}: {error}") from error


def _names() -> str:
    return " and ".join(source.name for source in SOURCES)


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.strip().splitlines() or ["no message"]
    return lines[0]


def _folder() -> Path:
    """Where what was built is kept: XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whet"


def _fingerprint() -> str:
    """Of everything that the built file depends on: the source, how it is built, and the processor that it is built for."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    how = (*FLAGS, platform.machine(), features, os.environ.get("CC", ""))
    return hashlib.sha256("\0".join((*(path.read_text() for path in (HEADER, *SOURCES)), *how)).encode()).hexdigest()[:16]
