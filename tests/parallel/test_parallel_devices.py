"""What a job of several processes does on devices that need not be at hand."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.parallel.tiny_models import model_of
from whet.model.contents import _in_place_of
from whet.model.parallel_plan import cuts_of
from whet.runs import job
from whet.train.watchdog import _num_begun


def test_a_part_that_is_kept_elsewhere_than_its_mesh_stays_there():
    """What `train.offload` keeps in the CPU's memory is not moved to the mesh's devices while weights are read."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        old = nn.Parameter(DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0)]))
        found = _in_place_of(old, torch.empty(3, 4, device="meta"))
        assert isinstance(found, nn.Parameter) and isinstance(found.data, DTensor)
        assert found.to_local().device.type == "meta" and found.requires_grad
        assert found.shape == (6, 4) and found.placements == old.placements and found.stride() == old.stride()
    finally:
        dist.destroy_process_group()


class Joining(Exception):
    """What stands in for the meeting of a job's processes."""


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("auto", "cpu:gloo,cuda:nccl"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_a_job_takes_cuda_only_where_its_model_does(device, backend, monkeypatch):
    """And NCCL's own limit comes after the watchdog's, which says which process did not come."""
    taken = []

    def meet(kind, *, timeout, **_):
        assert kind == backend and timeout > timedelta(seconds=2000)
        raise Joining

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(job.dist, "init_process_group", meet)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    config = SimpleNamespace(model=SimpleNamespace(device=device), train=SimpleNamespace(exchange_timeout_s=2000.0), run_dir="run")
    with pytest.raises(Joining), job.joined(config):
        pass
    assert taken == ([] if device == "cpu" else [1])


def test_exchanges_of_every_backend_of_a_group_are_counted():
    backends = {"cpu": SimpleNamespace(_get_sequence_number_for_group=lambda: 3)}
    backends["cuda"] = SimpleNamespace(_get_sequence_number_for_group=lambda: 4)
    group = SimpleNamespace(_device_types=["cpu", "cuda"], _get_backend=backends.__getitem__)
    assert _num_begun(group) == 7
    both = SimpleNamespace(_device_types=["cpu", "cuda"], _get_backend=lambda kind: backends["cpu"])
    assert _num_begun(both) == 3, "one backend for both counts once"


def test_a_transformers_that_cannot_cut_layers_is_told_its_version(monkeypatch):
    """5.17 has no size for experts in its configuration."""
    from transformers.distributed import configuration_utils

    def older(tp_size=None, fsdp_size=None):
        raise AssertionError("not reached: there is no ep_size")

    monkeypatch.setattr(configuration_utils, "DistributedConfig", older)
    with pytest.raises(ValueError, match=r"cutting layers or experts needs transformers 5\.23 or newer"):
        cuts_of(model_of("dense").hf, 2, 1, split_head=False)
