"""A run on this machine is alone: what listens, listens on the loopback interface, and when the run is killed nothing of it goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib

import psutil
import pytest

from tests.cluster.cluster_run import ROOT, begin, config_of, ended, family_of, make_files, rank_of, wait_for_lines
from whet.cluster import connection, head
from whet.cluster.ray_job import store_at

pytestmark = pytest.mark.long

GONE_S = 15.0
"""For all processes of a killed run to be gone."""
LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1"}
KEYLESS = {  # what docs/cluster.md says of open ports, by the process that has them
    "whet.runs.rank": "gloo",
    "whet.cluster.engine_worker": "gloo",
    "whet.engine.workers.worker": "gloo",
}
RAYS = re.compile(r"^ray::|/gcs_server|/raylet/raylet|_private/monitor\.py|dashboard/dashboard\.py|whet\.cluster\.head|-m whet train")
"""The processes of a cluster and those connected to it. They ask for its key, but where they tell only counts of what Ray does."""
SPREAD = {"train": {"parallel": {"shard": 2}}, "sync": {"transport": "broadcast"}}
WHERE = {
    "local": {**SPREAD, "engine": {"embedded": {"copies": 2}}},
    "ray": {**SPREAD, "cluster": {"backend": "ray", "layout": "disaggregate"}},
}


def ports_of(process: psutil.Process) -> list[tuple[str, int]]:
    return [(each.laddr.ip, each.laddr.port) for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]


def left_of(family: list[psutil.Process]) -> list[psutil.Process]:
    """Those of them that still run: psutil compares when they began."""
    left = []
    for process in family:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
        except psutil.NoSuchProcess:
            pass
    return left


@pytest.mark.parametrize("where", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_run_listens_on_loopback_alone_and_nothing_of_it_outlives_a_kill(tmp_path, where):
    make_files(tmp_path)
    run = begin(config_of(tmp_path, where, num_rollouts=100_000, deterministic=False, **WHERE[where]))
    family: list[psutil.Process] = []
    try:
        wait_for_lines(tmp_path / where / "metrics.jsonl", 2, run)
        family = family_of(run.pid)
        check_ports(family, on_ray=where == "ray")
        if where == "ray":
            check_key(rank_of(family, 0).environ())
        run.kill()
        deadline = time.monotonic() + GONE_S
        while left := left_of(family):
            assert time.monotonic() < deadline, [(process.pid, process.cmdline()) for process in left]
            time.sleep(0.1)
    finally:
        for process in left_of(family):
            process.kill()
        ended(run)


def check_ports(family: list[psutil.Process], *, on_ray: bool) -> None:
    """Every port is on loopback, and of a process that the page names."""
    num_rays = 0
    for process in family:
        line = " ".join(process.cmdline())
        for address, port in ports_of(process):
            assert address in LOOPBACK, f"{line} listens on {address}:{port}"
            if any(name in process.cmdline() for name in KEYLESS):
                continue
            assert on_ray and RAYS.search(line), f"{line} listens on {port}, of which docs/cluster.md says nothing"
            num_rays += 1
    assert bool(num_rays) == on_ray


def check_key(environment: dict[str, str]) -> None:
    """The run has a key of its own, and its cluster lets nobody in without it."""
    assert environment["RAY_AUTH_MODE"] == "token" and len(environment["RAY_AUTH_TOKEN"]) == 64
    address = re.search(r"127\.0\.0\.1:\d+", environment["WHET_ROOM"])
    assert address is not None
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    program = f"import ray; ray.init(address={address[0]!r}); print('in')"
    stranger = {**kept, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    done = subprocess.run([sys.executable, "-c", program], env=stranger, capture_output=True, text=True, timeout=120)
    assert done.returncode and "in" not in done.stdout.split() and "Error" in done.stderr


def test_a_cluster_of_the_runs_own_has_a_new_key_and_tells_nobody():
    set_already = {
        "RAY_ADDRESS": "10.0.0.1:6379",
        "RAY_AUTH_MODE": "disabled",
        "RAY_AUTH_TOKEN": "mine",
        "RAY_AUTH_TOKEN_PATH": "/a/file",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        "HOME": "/h",
    }
    found, other = head.private(set_already), head.private({})
    assert found["RAY_AUTH_MODE"] == other["RAY_AUTH_MODE"] == "token" and found["RAY_USAGE_STATS_ENABLED"] == "0"
    assert len({found["RAY_AUTH_TOKEN"], other["RAY_AUTH_TOKEN"], "mine"}) == 3 and len(found["RAY_AUTH_TOKEN"]) == 64
    assert found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0", "its node is at 127.0.0.1"
    assert "RAY_AUTH_TOKEN_PATH" not in found and "RAY_ADDRESS" not in found and found["HOME"] == "/h"


def test_a_cluster_that_does_not_start_is_told_with_its_last_words_and_leaves_the_environment(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    told = pytest.raises(ValueError, match=r"(?s)Ray could not start a cluster .* exit status 1; its last output:.*ValueError")
    with told, head.cluster_here(-1, 60.0):
        raise AssertionError("it has started")
    assert os.environ["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN" not in os.environ


def test_a_ray_whose_ports_ask_for_no_key_starts_no_cluster(monkeypatch):
    assert connection.MIN_RAY == (2, 54)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {need for needs in extras.values() for need in needs if need.startswith("ray")} == {"ray[default]>=2.54"}
    for version in ("2.9.0", "2.53.0"):
        with pytest.raises(ValueError, match=rf"the package ray is {version}, .* 2\.54 or newer; pip install -U 'whet\[ray\]'"):
            connection.check_version(version)
    for version in ("2.54.0", "2.100.1", "3.0.0.dev0"):
        connection.check_version(version)


def test_the_store_of_a_job_on_a_cluster_listens_on_one_address():
    store = store_at("127.0.0.1", 2)
    assert [address for address, port in ports_of(psutil.Process()) if port == store.port] == ["127.0.0.1"]
    with pytest.raises(ValueError, match=r"the cluster knows this machine as 203\.0\.113\.1, .*--node-ip-address"):
        store_at("203.0.113.1", 2)
