"""Servers that a run starts on Ray: each in a bundle, started again where it dies, gone when the run is; `whet serve` in SGLang's place."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.cluster.cluster_run import PRIVATE, ROOT, begin, cluster_by, config_of, ended, family_of, make_files, wait_for_lines
from tests.cluster.test_cluster_alone import left_of

pytestmark = pytest.mark.long

STANDIN = f"{ROOT / 'tests/engine/standin'}{os.pathsep}{ROOT}"
DEADLINE_S = 120


@pytest.fixture
def folder(tmp_path):
    make_files(tmp_path)
    return tmp_path


def servers_config(folder: Path, name: str, cluster: dict, num_rollouts: int = 100_000, **changes):
    engine = {"name": "sglang", "python": sys.executable, **changes.pop("engine", {})}
    cluster = {"backend": "ray", "layout": "disaggregate", **cluster}
    return config_of(folder, name, num_rollouts=num_rollouts, deterministic=False, cluster=cluster, engine=engine, **changes)


def serving(folder: Path) -> list[psutil.Process]:
    """The servers of a test, on whatever node."""
    model = str(folder / "model")
    return [each for each in psutil.process_iter() if {"serve", model} <= set(words_of(each))]


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def address_of(server: psutil.Process) -> tuple[str, int]:
    named = dict(word.split("=", 1) for word in server.cmdline() if "=" in word)
    return named["host"], int(named["port"])


def wait_until(found, words: str):
    deadline = time.monotonic() + DEADLINE_S
    while not (value := found()):
        assert time.monotonic() < deadline, words
        time.sleep(0.1)
    return value


def test_a_server_that_dies_on_ray_is_started_again_and_a_killed_run_leaves_none(folder):
    """On a cluster of the run's own, whose node is the controller's: servers listen on loopback."""
    run = begin(servers_config(folder, "own", {}, engine={"servers": 2, "pool": {"restarts": 2}}), PYTHONPATH=STANDIN)
    log = folder / "own/metrics.jsonl"
    family: list[psutil.Process] = []
    try:
        wait_for_lines(log, 2, run)
        first = serving(folder)
        assert len(first) == 2 and {address_of(each)[0] for each in first} == {"127.0.0.1"}
        first[0].kill()

        def restarted():
            rows = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
            return sum(row.get("engine/restarts", 0) for row in rows) == 1 and rows[-1].get("engine/members_up") == 2

        wait_until(restarted, "it was not started again")
        second = serving(folder)
        assert len(second) == 2 and first[1] in second and first[0] not in second
        family = [*family_of(run.pid), *second]
        run.kill()
        wait_until(lambda: not left_of(family), "something outlives the run")
    finally:
        for process in left_of([*family, *serving(folder)]):
            process.kill()
        _, _, err = ended(run)
    assert "[sglang 0] devices" in err and "[sglang 1] devices" in err


@pytest.fixture(scope="module")
def address():
    with cluster_by("gpu_nodes.py", PYTHONPATH=STANDIN) as line:
        yield line


def two_gpus(address: str, **cluster):
    """Two servers of two GPUs each, which the second node alone has room for."""
    engine = {"servers": 2, "sglang": {"args": {"tp_size": 2}}}
    return {"cluster": {"address": address, "trainer_gpus": 0, "start_timeout_s": 60.0, **cluster}, "engine": engine}


@pytest.mark.slow
def test_servers_on_another_node_get_its_gpus_and_a_key_and_end_with_a_killed_run(folder, address):
    config = servers_config(folder, "apart", sync={"transport": "broadcast"}, **two_gpus(address, private_network=True))
    run = begin(config, PYTHONPATH=STANDIN, **PRIVATE)
    servers: list[psutil.Process] = []
    try:
        wait_for_lines(folder / "apart/metrics.jsonl", 2, run)
        servers = serving(folder)
        assert len(servers) == 2
        for server in servers:
            host, port = address_of(server)
            assert host == "127.0.0.2"
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"http://{host}:{port}/model_info", timeout=30)
        run.kill()
        wait_until(lambda: not left_of(servers), "a server outlives the run")
    finally:
        for process in left_of([*servers, *serving(folder)]):
            process.kill()
        _, _, err = ended(run)
    devices = {line for line in err.splitlines() if "devices" in line}
    assert {line.partition("devices ")[2] for line in devices} == {"0,1, listens on 127.0.0.2", "2,3, listens on 127.0.0.2"}


@pytest.mark.slow
def test_a_node_whose_network_is_not_private_gets_no_server(folder, address):
    status, _, err = ended(begin(servers_config(folder, "open", **two_gpus(address)), PYTHONPATH=STANDIN, **PRIVATE))
    assert status == 2 and not serving(folder)
    assert "sglang 0 was placed on" in err or "sglang 1 was placed on" in err
    assert "set cluster.private_network=true if trusted machines alone reach it" in err


@pytest.mark.slow
def test_a_colocated_server_of_two_gpus_has_those_of_two_ranks(folder, address):
    """Each rank has half a processor, so that both and their server have room on the node with the GPUs, which is then the controller's."""
    config = servers_config(
        folder,
        "together",
        {"address": address, "layout": "colocate", "trainer_cpus": 0.5, "start_timeout_s": 60.0},
        num_rollouts=2,
        engine={"sglang": {"args": {"tp_size": 2}}},
        train={"parallel": {"shard": 2}},
    )
    status, _, err = ended(begin(config, PYTHONPATH=STANDIN, **PRIVATE))
    assert status == 0 and not serving(folder), err
    (line,) = [line for line in err.splitlines() if "devices" in line]
    assert line.partition("[sglang 0] devices ")[2] in ("0,1, listens on 127.0.0.1", "1,0, listens on 127.0.0.1")


@pytest.mark.slow
def test_a_server_on_two_nodes_of_two_gpus_each_is_lost_with_one_of_them_and_started_again(folder, address):
    """Ray has room for both of its processes on the second node alone: that they are two machines to SGLang is all that counts here."""
    config = servers_config(
        folder,
        "nodes",
        {"address": address, "trainer_gpus": 0, "start_timeout_s": 60.0, "private_network": True},
        engine={"sglang": {"args": {"tp_size": 4, "nnodes": 2}}, "pool": {"restarts": 2}},
    )
    run = begin(config, PYTHONPATH=STANDIN, **PRIVATE)
    log = folder / "nodes/metrics.jsonl"
    try:
        wait_for_lines(log, 2, run)
        (head,) = serving(folder)
        (follower,) = followers(folder)
        follower.kill()
        again = wait_until(lambda: [each for each in serving(folder) if each != head], "it was not started again")
        wait_until(lambda: not left_of([head]), "the first node's process outlives the second's")
        done = len(log.read_text().splitlines())
        wait_for_lines(log, done + 2, run)
        family = [*again, *followers(folder)]
        run.kill()
        wait_until(lambda: not left_of(family), "a server's process outlives the run")
    finally:
        for process in left_of([*serving(folder), *followers(folder)]):
            process.kill()
        _, _, err = ended(run)
    devices = {line.partition("] ")[2] for line in err.splitlines() if "devices" in line}
    assert devices == {"devices 0,1, listens on 127.0.0.2", "devices 2,3, listens on 127.0.0.2"}
    assert "[sglang 0 node 1] node 1 of 2 at 127.0.0.2 meets at 127.0.0.2" in err


def followers(folder: Path) -> list[psutil.Process]:
    """Processes of a test's servers on nodes that do not answer, but for those that guard them."""
    model = str(folder / "model")
    found = ((each, words_of(each)) for each in psutil.process_iter())
    return [each for each, words in found if words[1:3] == ["-m", "sglang.launch_server"] and model in words and ends_in(words, "1")]


def ends_in(words: list[str], rank: str) -> bool:
    return words[words.index("--node-rank") + 1] == rank
