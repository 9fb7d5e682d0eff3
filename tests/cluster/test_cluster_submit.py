"""`ray job submit`: the run is one of the cluster's jobs, finds the cluster by itself, and its status is the job's."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.cluster_run import PRIVATE, cluster_by, config_of, folder_with_one_process, metrics_of
from whet.config import dump_toml

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_with_one_process(tmp_path_factory.mktemp("submit"))


@pytest.fixture(scope="module")
def server():
    with cluster_by("job_server.py") as line:
        assert line.startswith("http://127.0.0.1:"), "the cluster is without a job server"
        yield line


def submit(server, config):
    """`ray job submit -- whet train`, waited for. Its exit status and all that was said."""
    path = Path(config.run_dir).with_suffix(".toml")
    path.write_text(dump_toml(config))
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "job", "submit", "--address", server, "--", sys.executable, "-m", "whet", "train"]
    environment = {**os.environ, **PRIVATE}
    deadline = time.monotonic() + 90
    while True:
        done = subprocess.run([*command, str(path)], env=environment, capture_output=True, text=True, timeout=240)
        if "No available agent to submit job" not in done.stdout + done.stderr or time.monotonic() > deadline:
            return done.returncode, done.stdout + done.stderr
        time.sleep(3)  # the cluster's job agent is still starting


def test_a_submitted_run_trains_on_the_clusters_processes(folder, server):
    status, said = submit(server, config_of(folder, "submitted", cluster={"backend": "ray"}, train={"parallel": {"shard": 2}}))
    assert status == 0 and "succeeded" in said, said
    for mine, theirs in zip(metrics_of(folder, "submitted"), metrics_of(folder, "alone"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-5)


def test_a_submitted_run_that_fails_is_a_failed_job_with_its_words(folder, server):
    status, said = submit(server, config_of(folder, "refused", cluster={"backend": "ray"}, reward={"name": "no_such_reward_anywhere"}))
    assert status != 0 and "no_such_reward_anywhere" in said and "failed" in said, said
