"""Any one process of a run on Ray is killed: the run recovers, or ends in time and says why; and what it goes on from is whole."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.cluster.cluster_run import begin, config_of, ended, family_of, make_files, metrics_of, rank_of, wait_for_lines
from tests.e2e.tiny_run import QUESTIONS
from whet.observe.records import read_records

pytestmark = [pytest.mark.long, pytest.mark.slow]

DEADLINE_S = 90
OURS = ("whet.runs.rank", "whet.cluster.engine_worker")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kill")
    make_files(folder)
    return folder


def run_config(folder, name, num_rollouts):
    """One rank of the trainer and one process of the engine, on devices of their own."""
    checkpoint = {"interval": 2, "keep": 2}
    cluster = {"backend": "ray", "layout": "disaggregate"}
    return config_of(folder, name, num_rollouts=num_rollouts, checkpoint=checkpoint, cluster=cluster, deterministic=False)


def worker(family: list[psutil.Process]) -> psutil.Process:
    """The engine's process."""
    [found] = [p for p in family if "whet.cluster.engine_worker" in p.cmdline()]
    return found


def parent(process: psutil.Process) -> psutil.Process:
    """The actor of a process."""
    found = process.parent()
    assert found is not None and "Agent" in " ".join(found.cmdline())
    return found


VICTIMS = {
    "engine": worker,
    "engine_actor": lambda family: parent(worker(family)),
    "trainer": lambda family: rank_of(family, 0),
    "trainer_actor": lambda family: parent(rank_of(family, 0)),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_run_recovers_or_ends_in_time_with_the_cause_and_goes_on(folder, victim):
    run = begin(run_config(folder, victim, 100_000))
    log = folder / victim / "metrics.jsonl"
    wait_for_lines(log, 5, run)
    family = family_of(run.pid)
    VICTIMS[victim](family).kill()
    recovered = lives(run, log, len(log.read_text().splitlines()) + 50)
    status, _, err = ended(run)
    assert recovered == victim.startswith("engine"), err
    assert status == (143 if recovered else 2), err
    if not recovered:
        assert "error: " in err and ("SIGKILL" in err or "signal 9" in err or "lost" in err or "exit status" in err), err
    assert not left_of(family)
    done = max(steps_of(folder / victim), default=0)
    status, _, err = ended(begin(run_config(folder, victim, done + 3)))
    assert status == 0, err
    check_ledger(folder / victim, done + 3)


def lives(run: subprocess.Popen[str], log: Path, num_lines: int) -> bool:
    """Whether a run comes to so many lines more; it is then asked to stop. Else it has ended in time."""
    deadline = time.monotonic() + DEADLINE_S
    while run.poll() is None:
        assert time.monotonic() < deadline, "the run neither went on nor ended"
        if len(log.read_text().splitlines()) > num_lines:
            run.send_signal(signal.SIGTERM)
            return True
        time.sleep(0.1)
    return False


def left_of(family: list[psutil.Process]) -> list[str]:
    """Processes of whet's that are still there."""
    deadline = time.monotonic() + 20
    left = ["?"]
    while left and time.monotonic() < deadline:
        left = []
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE and any(name in process.cmdline() for name in OURS):
                    left.append(str(process))
        time.sleep(0.1)
    return left


def steps_of(run_dir: Path) -> list[int]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def check_ledger(run_dir: Path, num_rollouts: int) -> None:
    """Every step is there once, with the version that it made; every task of every epoch was learned from once, in every sample."""
    rows = metrics_of(run_dir.parent, run_dir.name)
    assert [row["step"] for row in rows] == list(range(1, num_rollouts + 1))
    assert [row["run/version"] for row in rows] == [row["run/optimizer_step"] for row in rows] == list(range(1, num_rollouts + 1))
    per_epoch: Counter[tuple[int, str]] = Counter()
    for number in range(num_rollouts):
        for row in read_records(run_dir / f"rollouts/rollout_{number:06d}.parquet"):
            assert all(version <= number for version in row["versions"])
            per_epoch[number // 2, row["prompt"][0]["content"]] += 1
    whole = num_rollouts // 2
    assert {key: count for key, count in per_epoch.items() if key[0] < whole} == {
        (epoch, question): 3 for epoch in range(whole) for question in QUESTIONS
    }
