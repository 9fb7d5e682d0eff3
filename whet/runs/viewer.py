"""`whet view`: the page over runs, or over worked examples."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

MISSING = "whet view needs starlette and uvicorn: pip install 'whet[view]'"


def serve_page(runs: Sequence[Path], port: int, lesson: str | None, say: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        runs: folders of runs.
        port: 0: one that is free.
        lesson: name of a worked example, or `all`; it is computed first. None: none.
        say: prints a line.

    Raises:
        ValueError: a folder holds no run, there is no such example, the port is taken, or a package is missing.
    """
    try:
        from whet.view.server import view
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn"):
            raise
        raise ValueError(MISSING) from error

    def ready(address: str) -> None:
        say(f"{address}\nCtrl-C ends it")

    if lesson is None:
        view(runs, port, ready)
        return
    from whet.view.lessons import write_lessons

    with tempfile.TemporaryDirectory(prefix="whet-lesson-") as folder:
        view([*write_lessons(Path(folder), lesson), *runs], port, ready)
