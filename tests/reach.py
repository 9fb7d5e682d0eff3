"""Folders of tests that programs with a user of their own can reach."""

from __future__ import annotations

import tempfile
from pathlib import Path


def open_to_all(folder: Path) -> None:
    """Let every user enter and list a test's folder; pytest makes its folders for this user alone."""
    top = Path(tempfile.gettempdir())
    for one in (folder, *folder.parents):
        if top not in one.parents:
            return
        one.chmod(0o755)
