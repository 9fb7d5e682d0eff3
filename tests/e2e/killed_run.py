"""Starts of `whet train`, one after another, each in a process of its own that may kill itself with SIGKILL at a given moment:
`python -m tests.e2e.killed_run STARTS_JSON`, a list of [settings, moment or null]. Prints the exit status of each.
What the n-th start left in its folder is copied to `<run_dir>.<n>`.

The processes are forks of this one, so that the imports are paid for once.
"""

from __future__ import annotations

import json
import shutil
import sys

import whet.algo.grpo
import whet.build.parts
import whet.train.torch_native.backend  # noqa: F401
from tests.e2e import killed_quickstart
from whet.runs.commands import train
from whet.settings.rl import RunConfig


def start(n: int, settings: dict, moment: dict | None) -> int:
    """The exit status; less than 0: the signal that ended it."""

    def run() -> None:
        if moment is not None:
            killed_quickstart.plant(killed_quickstart.Moment(**moment))
        train(RunConfig.model_validate(settings))

    status = killed_quickstart.forked(run)
    shutil.copytree(settings["run_dir"], f"{settings['run_dir']}.{n}")
    return status


if __name__ == "__main__":
    print(json.dumps([start(n, *each) for n, each in enumerate(json.loads(sys.argv[1]))]))
