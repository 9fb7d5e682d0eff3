"""GPUs of the servers that whet starts: how many each needs, which it gets, and that its process sees those alone."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.engine.test_engine_sglang import letters
from whet.check.budget import server_gpus
from whet.engine.base import EngineFailed
from whet.engine.servers.config import ServersConfig
from whet.engine.servers.devices import Assignment, assign_devices, gpus_needed, trainer_devices, visible_devices
from whet.engine.servers.hosts import LocalHost, local_host
from whet.engine.servers.pool import sites_here
from whet.engine.servers.start import ServerStarter
from whet.engine.sglang.start import Sglang
from whet.settings.rl import RunConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RUN = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "reward": {"name": "math"}, "num_rollouts": 1}


@pytest.mark.parametrize(
    ("kind", "args", "count"),
    [
        ("vllm", {}, 1),
        ("vllm", {"tensor_parallel_size": 4}, 4),
        ("vllm", {"tensor-parallel-size": 2, "pipeline_parallel_size": 3, "data_parallel_size": "2"}, 12),
        ("vllm", {"tensor_parallel": 2, "data_parallel_size_local": 1, "max_num_seqs": 8}, 2),
        ("vllm", {"prefill_context_parallel_size": 2, "decode_context_parallel_size": 2}, 2),
        ("sglang", {"tp_size": 4, "ep_size": 4}, 4),
        ("sglang", {"tp": 2, "pp-size": 2, "dp": 2}, 8),
        ("sglang", {"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 1}, 4),
        ("sglang", {"tp_size": 8, "dp_size": 8, "enable_dp_attention": True}, 8),
        ("sglang", {"tp_size": 2, "device": "cpu"}, 0),
    ],
)
def test_a_servers_arguments_say_how_many_gpus_it_needs(kind, args, count):
    assert gpus_needed(kind, args) == count


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "many"])
def test_a_size_that_is_no_number_of_processes_is_an_error_of_the_settings(size):
    with pytest.raises(ValueError, match=r"engine.vllm.args: tensor_parallel_size=.* set a whole number of 1 or more"):
        RunConfig.model_validate(RUN | {"engine": {"name": "vllm", "vllm": {"args": {"tensor_parallel_size": size}}}})


@pytest.mark.parametrize(
    ("setting", "count", "names"),
    [
        (None, 0, ()),
        (None, 3, ("0", "1", "2")),
        ("", 0, ()),
        ("4, 5", 2, ("4", "5")),
        ("1,-1,2", 1, ("1",)),
        ("GPU-8a,GPU-8b", 2, ("GPU-8a", "GPU-8b")),
        ("MIG-1,MIG-2", 1, ("MIG-1", "MIG-2")),
        ("MIG-1,MIG-2", 0, ()),
    ],
)
def test_the_devices_of_this_process(setting, count, names):
    """torch counts one of several MIG instances, and none behind an entry that is no device."""
    assert visible_devices(setting, count) == names


@pytest.mark.parametrize(
    ("device", "index", "environment", "places"),
    [
        ("cpu", None, {"WORLD_SIZE": "4"}, set()),
        ("cuda", None, {}, {0}),
        ("cuda", 3, {}, {3}),
        ("cuda", None, {"WORLD_SIZE": "4"}, {0, 1, 2, 3}),
        ("cuda", 0, {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "2"}, {0, 1}),
    ],
)
def test_the_devices_of_the_trainers_ranks_on_this_machine(device, index, environment, places):
    assert trainer_devices(device, index, environment) == places


EIGHT = tuple("abcdefgh")


@pytest.mark.parametrize(
    ("servers", "needed", "visible", "trainer", "devices", "shared"),
    [
        (2, 1, (), {0}, [(), ()], False),
        (2, 0, EIGHT, {0}, [(), ()], False),
        (2, 1, EIGHT, {0}, [("b",), ("c",)], False),
        (2, 2, EIGHT, {0, 1, 2, 3}, [("e", "f"), ("g", "h")], False),
        (3, 2, EIGHT, {0, 1}, [("c", "d"), ("e", "f"), ("g", "h")], False),
        (2, 1, EIGHT, {1}, [("a",), ("c",)], False),
        (2, 4, EIGHT, set(), [tuple("abcd"), tuple("efgh")], False),
        (2, 4, EIGHT, {0}, [tuple("abcd"), tuple("efgh")], True),
        (4, 1, EIGHT, set(range(8)), [("a",), ("b",), ("c",), ("d",)], True),
        (1, 1, ("a",), {0}, [("a",)], True),
    ],
)
def test_each_server_has_devices_of_its_own(servers, needed, visible, trainer, devices, shared):
    assert assign_devices(servers, needed, visible, trainer, "vllm") == Assignment(tuple(devices), shared)


def test_too_few_devices_are_an_error_with_the_numbers_and_what_to_set():
    words = r"engine.servers=3 with 4 GPUs each \(by engine.sglang.args\) need 12 GPUs, and this process may use 8 .*: set engine.servers"
    with pytest.raises(ValueError, match=words):
        assign_devices(3, 4, EIGHT, {0}, "sglang")


@pytest.fixture
def eight(monkeypatch):
    """A machine of eight GPUs."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def hosts_of(device, **engine):
    config = ServersConfig.model_validate({"name": "sglang", "servers": 2, **engine})
    sites = sites_here(config, device)
    return [sites.hosts(name, threading.Event()) for name in config.names], sites.share_gpus


def test_servers_of_a_machine_share_no_gpu(eight, monkeypatch):
    assert hosts_of(CUDA) == ([LocalHost(("1",)), LocalHost(("2",))], False)
    assert hosts_of(CPU) == ([LocalHost(("0",)), LocalHost(("1",))], False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert hosts_of(CUDA, sglang={"args": {"tp_size": 2}}) == ([LocalHost(("4", "5")), LocalHost(("6", "7"))], False)
    assert hosts_of(CUDA, sglang={"args": {"tp_size": 4}})[1], "they share with the trainer"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    assert hosts_of(CUDA) == ([LocalHost(("3",)), LocalHost(("2",))], False)
    with pytest.raises(ValueError, match="need 16 GPUs, and this process may use 8"):
        hosts_of(CUDA, sglang={"args": {"tp_size": 8}})


def test_devices_that_the_user_chooses_are_left_to_him(eight, monkeypatch):
    assert hosts_of(CUDA, sglang={"args": {"base_gpu_id": 4}}) == ([LocalHost()] * 2, False)
    assert hosts_of(CUDA, name="vllm", vllm={"args": {"device-ids": "4,5"}}) == ([LocalHost()] * 2, False)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,5")
    assert hosts_of(CUDA) == ([LocalHost()] * 2, False)


def test_nothing_changes_on_a_machine_without_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert hosts_of(CPU, servers=40) == ([LocalHost()] * 40, False)


def test_a_check_finds_servers_that_share_gpus_or_lack_them(eight):
    def found(servers, shard=1):
        engine = {"name": "sglang", "servers": servers, "sglang": {"args": {"tp_size": 2}}}
        train = {"parallel": {"shard": shard}} if shard > 1 else {}
        model = {"path": "m", "device": "cuda" if shard > 1 else "cpu"}
        return [note.text for note in server_gpus(RunConfig.model_validate(RUN | {"engine": engine, "train": train, "model": model}))]

    assert found(4) == [] == found(3, shard=2)
    assert found(4, shard=2)[0].startswith("servers share GPUs with the trainer")
    with pytest.raises(ValueError, match="need 10 GPUs, and this process may use 8"):
        found(5)


def starter(folder: Path, host) -> ServerStarter:
    """Of a server that writes down its GPUs, and ends."""
    (folder / "sglang").mkdir(exist_ok=True)
    script = f"import os; open({str(folder / 'seen')!r}, 'a').write(os.environ.get('CUDA_VISIBLE_DEVICES', 'all') + ';')"
    (folder / "sglang/launch_server.py").write_text(script)
    return ServerStarter(Sglang(), "sglang 0", sys.executable, folder, "float32", {}, letters, None, 20.0, lambda *_: host)


def test_the_process_of_a_server_sees_its_gpus_alone_and_again_after_a_restart(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).resolve().parents[2]}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    start = starter(tmp_path, LocalHost(("GPU-1", "GPU-3")))
    for _ in range(2):
        with pytest.raises(EngineFailed, match="sglang 0 did not start"):
            start(threading.Event())
    with pytest.raises(EngineFailed, match="sglang 0 did not start"):
        starter(tmp_path, local_host("sglang 0", threading.Event()))(threading.Event())
    assert (tmp_path / "seen").read_text() == "GPU-1,GPU-3;GPU-1,GPU-3;all;"
