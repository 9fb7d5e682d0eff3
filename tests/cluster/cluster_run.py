"""A run of seconds for a job: a tiny model, four questions, rewards that vary whatever is written; and its processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.e2e import tiny_run
from tests.e2e.tiny_run import over, run_config
from whet.config import dump_toml
from whet.quickstart.model import SmallModelConfig
from whet.runs import commands
from whet.settings.rl import BaseRunConfig, RunConfig
from whet.settings.supervised import kind_of

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_USAGE_STATS_ENABLED": "0"}
SHAPE = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48)
"""That two ranks can share."""


def make_files(folder: Path) -> None:
    tiny_run.make_files(folder, SHAPE)


def config_of(folder: Path, name: str, **changes: Any) -> RunConfig:
    train = {"optim": {"lr": 1e-3}, "max_tokens_per_device": 64}
    own = {"num_rollouts": 3, "observe": {"display": "plain"}, "train": train}
    return run_config(folder, name, **over(own, changes))


def folder_with_one_process(folder: Path) -> Path:
    """With files, and the run `alone` of one process that others are compared with."""
    make_files(folder)
    commands.train(config_of(folder, "alone"))
    return folder


@contextmanager
def cluster_by(script: str, **changes: str) -> Iterator[str]:
    """A Ray cluster that a script of this folder starts, and ends when its input does; gives the line that it says, its address.
    `changes` are of its environment."""
    environment = {**os.environ, **PRIVATE, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}
    command = [sys.executable, str(Path(__file__).with_name(script))]
    cluster = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert cluster.stdin is not None and cluster.stdout is not None
    family: list[psutil.Process] = []
    try:
        line = cluster.stdout.readline().strip()
        assert line, "the cluster did not start"
        family = family_of(cluster.pid)
        yield line
    finally:
        cluster.stdin.close()
        try:
            cluster.wait(30)
        finally:
            cluster.stdout.close()
            for process in [*family, *family_of(cluster.pid)]:
                if process.is_running():
                    process.kill()


def metrics_of(folder: Path, name: str) -> list[dict[str, float]]:
    """What was logged, without what tells of the machine or of which samples shared a row."""
    lines = tiny_run.metrics_of(folder / name)
    return [{key: value for key, value in line.items() if key != "train/shared"} for line in lines]


def begin(config: BaseRunConfig, **environment: str) -> subprocess.Popen[str]:
    """`whet train`, or what else the settings are for, in a process of its own."""
    path = Path(config.run_dir).with_suffix(".toml")
    path.write_text(dump_toml(config))
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "whet", kind_of(config), str(path)]
    return subprocess.Popen(command, cwd=ROOT, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(run: subprocess.Popen[str], timeout_s: float = 150) -> tuple[int, str, str]:
    """Exit status, output and errors. Whatever is still there of it afterwards is ended."""
    family = family_of(run.pid)
    try:
        out, err = run.communicate(timeout=timeout_s)
    finally:
        for process in [*family, *family_of(run.pid)]:
            if process.is_running():
                process.kill()
    return run.returncode, out, err


def family_of(pid: int) -> list[psutil.Process]:
    """A process and all that it started, with what those started."""
    try:
        first = psutil.Process(pid)
        return [first, *first.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def rank_of(family: list[psutil.Process], rank: int) -> psutil.Process:
    """The process of a rank."""
    found = [p for p in family if "whet.runs.rank" in p.cmdline() and p.environ().get("RANK") == str(rank)]
    assert len(found) == 1, f"{len(found)} processes are rank {rank}"
    return found[0]


def wait_for_lines(path: Path, count: int, run: subprocess.Popen[str], timeout_s: float = 120) -> None:
    """Until so many steps are logged."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() or path.read_text().count("\n") < count:
        assert run.poll() is None, f"the run ended: {run.communicate()}"
        assert time.monotonic() < deadline, f"{path} has no {count} lines after {timeout_s} s"
        time.sleep(0.05)
