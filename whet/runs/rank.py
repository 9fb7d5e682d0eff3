"""`python -m whet.runs.rank`: a process of a job, which reads its part from the process that started the job."""

from __future__ import annotations

import json

from whet.cluster.process import read_line
from whet.runs.errors import guarded
from whet.runs.job import train
from whet.settings.supervised import RUN_CONFIGS


def main() -> None:
    """Train as a line of JSON from `whet.runs.job.launch` says."""
    received = json.loads(read_line())
    config = RUN_CONFIGS[received["kind"]].model_validate(received["config"])
    guarded(lambda: train(config, received["command"], tuple(received["notes"])), received["command"])


if __name__ == "__main__":
    main()
