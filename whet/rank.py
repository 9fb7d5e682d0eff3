"""`python -m whet.rank`: a process of a job, as the one that started the job tells it."""

from __future__ import annotations

import json

from whet.cli import guarded
from whet.cluster.process import read_line
from whet.job import train
from whet.supervised_settings import RUN_CONFIGS


def main() -> None:
    """Train as told in a line of JSON (`whet.job.launch`)."""
    told = json.loads(read_line())
    config = RUN_CONFIGS[told["kind"]].model_validate(told["config"])
    guarded(lambda: train(config, told["command"]), told["command"])


if __name__ == "__main__":
    main()
