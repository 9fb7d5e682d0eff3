"""Records of a process that is killed with SIGKILL while it writes them: whole files, and nothing else that a reader would take for one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.observe.test_records import GROUPS, SAMPLE, numbers
from whet.observe.records import RecordThread, RecordWriter, drop_records, read_index, read_records
from whet.observe.retention import RecordsConfig

ROLLOUTS = 400


def write_until_killed(folder: Path, first: int) -> None:
    """Write rollout after rollout, with a line of output for each that was handed over."""
    thread = RecordThread(RecordWriter(folder, RecordsConfig(keep=20)))
    for i in range(first, first + ROLLOUTS):
        thread.write(i, GROUPS, [SAMPLE], numbers(advantages=[[0.0, 0.0, 1.5, 1.5, 0.0, 1.5]], first_clip=[[float("nan")] * 3 + [1.0] * 3]))
        print(i, flush=True)
    thread.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_process_that_is_killed_leaves_whole_files(tmp_path, seed):
    draw, first, whole = random.Random(seed), 0, 0
    for _ in range(3):
        code = f"from pathlib import Path; from {__name__} import write_until_killed as write; write(Path({str(tmp_path)!r}), {first})"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            for _ in range(draw.randrange(3, 40)):
                assert process.stdout.readline(), process.stderr.read()
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL, "it was still writing"
        files = sorted((tmp_path / "rollouts").rglob("*.parquet"))
        assert all(pq.read_table(file).num_rows == 3 for file in files)
        found = {row["rollout_id"] for row in read_records(tmp_path / "rollouts")}
        indexed = read_index(tmp_path / "rollouts").column("rollout_id").to_pylist()
        assert found <= set(indexed) and set(indexed) == set(range(max(indexed) + 1)), "none in between is missing"
        assert max(indexed) >= whole
        first = whole = max(indexed) - 1
        drop_records(tmp_path, first)
        assert not list((tmp_path / "rollouts").rglob("*.tmp"))
        assert set(read_index(tmp_path / "rollouts").column("rollout_id").to_pylist()) == set(range(first))
