"""What a run sets apart on a cluster, and which layouts go with who computes when."""

from __future__ import annotations

import os
import socket

import pytest

from whet.cluster.config import ClusterConfig
from whet.cluster.connection import check_reachable
from whet.cluster.engine_worker import line_of
from whet.cluster.process import Command
from whet.cluster.room import EngineRoom, plan_room, shared_devices
from whet.engine.workers.dialing import Invitation
from whet.runs.job import train
from whet.settings.rl import RunConfig


def ray(**changes):
    return ClusterConfig.model_validate({"backend": "ray", **changes})


def run(**changes):
    base = {"model": {"path": "m"}, "data": {"train": "x.jsonl"}, "reward": {"name": "exact"}, "num_rollouts": 1}
    return RunConfig.model_validate({**base, **changes})


def test_an_engine_in_the_controllers_process_needs_no_room():
    planned = plan_room(ray(trainer_cpus=2), 3, 0, 0)
    assert planned.bundles == ({"CPU": 2},) * 3 and planned.ranks == (0, 1, 2)
    assert planned.trainer == {"CPU": 2} and planned.engines == ()


@pytest.mark.parametrize(("ranks", "engines", "bundles"), [(2, 2, 2), (1, 3, 3), (3, 1, 3)])
def test_colocated_processes_share_bundles_and_their_gpu(ranks, engines, bundles):
    planned = plan_room(ray(engine_cpus=2), ranks, engines, 8)
    assert planned.bundles == ({"CPU": 3, "GPU": 1},) * bundles
    assert planned.trainer == {"CPU": 1, "GPU": 0.5} and planned.engine == {"CPU": 2, "GPU": 0.5}
    assert planned.engines == tuple(range(engines))


@pytest.mark.parametrize("layout", ["disaggregate", "async"])
def test_processes_apart_have_bundles_of_their_own(layout):
    planned = plan_room(ray(layout=layout, engine_gpus=2), 2, 1, 8)
    trainer, engine = {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 2}
    assert planned.bundles == (trainer, trainer, engine)
    assert (planned.trainer, planned.engine, planned.engines) == (trainer, engine, (2,))


def test_a_server_has_a_bundle_with_as_many_gpus_as_its_arguments_ask_for():
    planned = plan_room(ray(layout="async"), 2, 2, 8, 4)
    trainer, engine = {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 4}
    assert planned.bundles == (trainer, trainer, engine, engine) and planned.engine == engine
    assert plan_room(ray(layout="async"), 2, 2, 0, 4).engine == {"CPU": 1}, "a cluster without GPUs"
    assert plan_room(ray(layout="async", engine_gpus=6), 1, 1, 8, 4).engine == {"CPU": 1, "GPU": 6}
    assert plan_room(ray(layout="async", engine_gpus=0.5), 1, 1, 8, 1).engine == {"CPU": 1, "GPU": 0.5}
    with pytest.raises(ValueError, match=r"cluster.engine_gpus=1 is less than the 4 GPUs that each server computes on"):
        plan_room(ray(layout="async", engine_gpus=1), 2, 2, 8, 4)


def test_a_colocated_server_of_several_gpus_has_those_of_as_many_ranks():
    planned = plan_room(ray(engine_cpus=3), 5, 2, 8, 2)
    group, alone = {"CPU": 5, "GPU": 2}, {"CPU": 1, "GPU": 1}
    assert planned.bundles == (group, group, alone) and planned.ranks == (0, 0, 1, 1, 2)
    assert (planned.trainer, planned.engine, planned.engines) == (alone, {"CPU": 3}, (0, 1))
    assert shared_devices(planned, ["4", "5", "0", "1", "7"]) == ("4,5", "0,1")
    for others in (plan_room(ray(), 2, 2, 8, 1), plan_room(ray(layout="async"), 2, 2, 8, 2), plan_room(ray(), 2, 1, 0, 2)):
        assert shared_devices(others, ["0", "1"]) == ()
    with pytest.raises(ValueError, match=r"each of 2 servers share the GPUs of 4 ranks, .* there are 5 ranks with 1 GPUs"):
        plan_room(ray(), 5, 2, 8, 4)


def test_servers_of_a_run_are_placed_with_their_gpus():
    sglang = {"name": "sglang", "servers": 3, "sglang": {"args": {"tp_size": 2}}}
    apart = run(cluster={"backend": "ray", "layout": "disaggregate"}, engine=sglang)
    assert apart.engine_places == (3, 2) and apart.num_engines_apart == 0
    nodes = {"name": "vllm", "servers": 3, "vllm": {"args": {"tensor_parallel_size": 16, "nnodes": 2}}}
    private = {"backend": "ray", "layout": "disaggregate", "private_network": True}
    assert run(cluster=private, engine=nodes).engine_places == (6, 8)
    assert run(cluster={"backend": "ray", "layout": "disaggregate"}).engine_places == (1, 1)
    assert run(engine={"name": "sglang", "urls": ["http://a:1"]}).engine_places == (0, 1)
    overlaps = run(cluster={"backend": "ray"}, engine={"name": "vllm", "urls": ["http://a:1"]}, control={"max_staleness": 1})
    assert overlaps.engine_places == (0, 1), "layouts are of what whet starts"


@pytest.mark.parametrize(
    ("cluster", "engine", "words"),
    [
        ({"layout": "disaggregate"}, {"name": "vllm", "urls": ["http://a:1"]}, "layout=.*no effect .cluster. with servers that run"),
        ({"private_network": True}, {"name": "vllm", "urls": ["http://a:1"]}, "private_network=.*no effect"),
        ({}, {"name": "vllm", "vllm": {"args": {"nnodes": 2, "tensor_parallel_size": 4}}}, r"on 2 nodes.*private_network=true if"),
        ({}, {"name": "vllm", "vllm": {"args": {"nnodes": 2}}}, r"a server of 1 GPUs cannot be on 2 nodes \(nnodes\): set sizes"),
        ({}, {"name": "sglang", "sglang": {"args": {"nnodes": 0}}}, r"engine.sglang.args: nnodes=0 is no number of nodes; set a whole"),
        ({"private_network": True}, {}, r"private_network=.* no effect \(cluster\) with engine.name='embedded'; set engine.name=vllm or"),
    ],
)
def test_settings_of_places_that_nothing_reads_are_refused(cluster, engine, words):
    with pytest.raises(ValueError, match=words):
        run(cluster={"backend": "ray", **cluster}, engine=engine)


def test_what_the_controller_is_told_reads_back():
    room = EngineRoom("10.0.0.1:6379", "space", "whet-1", {"CPU": 1.0}, (1, 2), "node", ("0,1", "2,3"))
    assert EngineRoom.of(room.to_text()) == room


def test_a_workers_line_is_one_line_and_holds_the_key():
    text = line_of(Invitation("10.0.0.1", 99, b"\n\x00key", 5.0))
    assert "\n" not in text and b"\n\x00key".hex() in text
    assert text not in repr(Command(("-m", "whet"), text))


@pytest.mark.parametrize(
    ("cluster", "control", "words"),
    [
        ({"layout": "async"}, {}, r"set control.max_staleness=1 or more"),
        ({"layout": "async"}, {"max_staleness": 2, "overlap": False}, r"leave control.overlap unset"),
        ({"layout": "disaggregate"}, {"max_staleness": 1}, r"set layout=async, or control.overlap=false"),
        ({}, {"max_staleness": 1}, r"with cluster.layout=colocate engine and trainer take turns"),
    ],
)
def test_layouts_that_do_not_go_with_who_computes_when_are_refused(cluster, control, words):
    with pytest.raises(ValueError, match=words):
        run(cluster={"backend": "ray", **cluster}, control=control)


def test_layouts_that_do():
    assert run(cluster={"backend": "ray", "layout": "async"}, control={"max_staleness": 2}).num_engines_apart == 1
    assert run(cluster={"backend": "ray", "layout": "disaggregate"}, sync={"transport": "disk"}).sync.transport == "disk"
    assert run(cluster={"backend": "ray", "layout": "disaggregate"}).num_engines_apart == 1
    assert run(cluster={"backend": "ray"}).num_engines_apart == 0
    assert run(cluster={"backend": "ray"}, engine={"embedded": {"copies": 2}}).num_engines_apart == 2
    assert run(control={"max_staleness": 2}).num_engines_apart == 0


def test_settings_of_ray_without_ray_are_refused():
    with pytest.raises(ValueError, match=r"layout=.*disaggregate.* has no effect with cluster.backend='local'; set cluster.backend=ray"):
        run(cluster={"layout": "disaggregate"})


def test_torchrun_and_ray_do_not_mix(monkeypatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ValueError, match="use one of the two"):
        train(run(cluster={"backend": "ray"}))


def test_an_address_is_tried_before_ray_is():
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        check_reachable(address, "cluster.address")
    with pytest.raises(ValueError, match=f"cluster.address: there is no Ray cluster at {address}: Connection refused"):
        check_reachable(address, "cluster.address")
    check_reachable("auto", "cluster.address")


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "head", "head:port"])
def test_what_is_no_address_of_a_cluster_is_refused(address):
    with pytest.raises(ValueError, match=r"RAY_ADDRESS is .*; give auto, or HOST:PORT"):
        check_reachable(address, "RAY_ADDRESS")
