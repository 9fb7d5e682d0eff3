"""What a run sets apart on a cluster, and which layouts go with who computes when."""

from __future__ import annotations

import os
import socket

import pytest

from whet.cluster.config import ClusterConfig
from whet.cluster.connection import check_reachable
from whet.cluster.engine_worker import line_of
from whet.cluster.process import Command
from whet.cluster.room import EngineRoom, plan_room
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
    assert planned.bundles == ({"CPU": 2},) * 3
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


def test_what_the_controller_is_told_reads_back():
    room = EngineRoom("10.0.0.1:6379", "space", "whet-1", {"CPU": 1.0}, (1, 2), "node")
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
