"""The compiled part of decoding: decode.c and draw.c, built with the C compiler at hand, once for each
version and each processor."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from whet.runfolder.child_environment import child_environment

SOURCES = tuple(Path(__file__).with_name(name) for name in ("decode.c", "draw.c"))
HEADER = Path(__file__).with_name("vectors.h")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
BUILD_LIMIT_S = 60
ENDING = ".so"


class NotCompiled(Exception):
    """There is no compiled step; the text says why."""


class DecodeStep(ctypes.Structure):
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
    folder = _folder()
    begin = f"decode-{_fingerprint()}-"
    path = _kept(folder, begin) or _build(folder, begin)
    found = _load(path)
    for name, takes in (("decode_step", DecodeStep), ("decode_logits", Logits), ("draw_tokens", Draw)):
        function = getattr(found, name)
        function.argtypes, function.restype = [ctypes.POINTER(takes)], None
    found.decode_scratch_floats.argtypes = [ctypes.POINTER(DecodeStep)]
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


def _kept(folder: Path, begin: str) -> Path | None:
    """An earlier build, if there is one: its name ends in its digest. A file with another digest is not
    used."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(begin) and name.endswith(ENDING))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotCompiled(f"{folder} cannot be read: {error.strerror}") from error
    return next((folder / name for name in names if _digest_of(folder / name) == name.removeprefix(begin).removesuffix(ENDING)), None)


def _build(folder: Path, begin: str) -> Path:
    """Build into place, safely if other processes do the same."""
    command = compiler()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True, mode=0o700)
        _check_owner(folder, os.lstat(folder))
        with tempfile.TemporaryDirectory(dir=folder) as draft:
            made = Path(draft) / "made"
            line = [*command, *FLAGS, "-o", str(made), *map(str, SOURCES), "-lm"]
            done = subprocess.run(line, capture_output=True, text=True, timeout=BUILD_LIMIT_S, env=child_environment())
            if done.returncode:
                raise NotCompiled(f"{' '.join(command)} cannot build {_names()}: {_first_error(done.stderr)}")
            made.chmod(0o700)
            path = folder / f"{begin}{hashlib.sha256(made.read_bytes()).hexdigest()}{ENDING}"
            os.replace(made, path)
            return path
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"{_names()} were not built into {folder}: {error}") from error


def _load(path: Path) -> ctypes.CDLL:
    """Load the very file whose owner and digest were looked at, not what has its name a moment later. It stays open for that."""
    file = _open(path)
    if (digest := _digest(file)) != path.name.removesuffix(ENDING).rpartition("-")[2]:
        raise NotCompiled(f"{path} has the digest {digest}, not that of its name; delete it, and it is built anew")
    opened = Path(f"/proc/self/fd/{file}")
    try:
        return ctypes.CDLL(str(opened if opened.exists() else path))
    except OSError as error:
        raise NotCompiled(f"{path} cannot be loaded ({error}); delete it, and it is built anew") from error


def _digest_of(path: Path) -> str:
    file = _open(path)
    try:
        return _digest(file)
    finally:
        os.close(file)


def _digest(file: int) -> str:
    with open(file, "rb", closefd=False) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _open(path: Path) -> int:
    """Open an ordinary file of this user's own, in a folder that nobody else can write into; links are not followed.

    Raises:
        NotCompiled: if it is anything else.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check_owner(path.parent, os.fstat(folder))
            file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise NotCompiled(f"{path} is not loaded: {error.strerror}; delete {path.parent}, and it is built anew") from error
    try:
        found = os.fstat(file)
        _check_owner(path, found)
        if not stat.S_ISREG(found.st_mode):
            raise NotCompiled(f"{path} is not loaded: it is no ordinary file")
    except NotCompiled:
        os.close(file)
        raise
    return file


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Code is loaded from what this user alone can have written."""
    if found.st_uid != os.geteuid():
        whose = f"{path} belongs to user {found.st_uid}, and nothing is loaded from it"
        raise NotCompiled(f"{whose}; delete it, or set XDG_CACHE_HOME to a folder of your own")
    if found.st_mode & 0o022:
        raise NotCompiled(f"others may write into {path}, and nothing is loaded from it; delete it, or take that right away (chmod go-w)")


def _names() -> str:
    return " and ".join(source.name for source in SOURCES)


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.strip().splitlines() or ["no message"]
    return lines[0]


def _folder() -> Path:
    """Folder of the builds: this user's own, in XDG_CACHE_HOME or ~/.cache, which other users may
    share."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / f"whet-{os.geteuid()}"


def _fingerprint() -> str:
    """Fingerprint of everything that the built file depends on: the source, its flags, and the
    processor that it is built for."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    how = (*FLAGS, platform.machine(), features, os.environ.get("CC", ""))
    return hashlib.sha256("\0".join((*(path.read_text() for path in (HEADER, *SOURCES)), *how)).encode()).hexdigest()[:16]
