"""`python -m whet.runs.rank`: a process of a job, as the one that started the job tells it."""

from __future__ import annotations

import json

from whet.cluster.process import read_line
from whet.runs.errors import guarded
from whet.runs.job import train
from whet.settings.supervised import RUN_CONFIGS


def main() -> None:
    """Train as told in a line of JSON (`whet.runs.job.launch`)."""
    told = json.loads(read_line())
    config = RUN_CONFIGS[told["kind"]].model_validate(told["config"])
    guarded(lambda: train(config, told["command"], tuple(told["notes"])), told["command"])


if __name__ == "__main__":
    main()
