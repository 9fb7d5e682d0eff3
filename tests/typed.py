"""Commands as a user types them: in this process, which has loaded the heavy libraries, or in one of their own."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path

import pytest

from whet.cli import main

ROOT = Path(__file__).resolve().parents[1]


def whet_here(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `whet` with these arguments in this process: exit status, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    typed = ["whet", *map(str, arguments)]
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", typed)
        status = 0
        try:
            main()
        except SystemExit as end:
            assert isinstance(end.code, int)
            status = end.code
    return subprocess.CompletedProcess(typed, status, out.getvalue(), err.getvalue())


def whet(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `whet` with these arguments in a process of its own."""
    typed = [sys.executable, "-m", "whet", *map(str, arguments)]
    return subprocess.run(typed, capture_output=True, text=True, timeout=240, cwd=cwd, check=False)
