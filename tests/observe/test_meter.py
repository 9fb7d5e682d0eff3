from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from whet.observe import peaks
from whet.observe.devices import peak_tflops
from whet.observe.meter import Devices, Meter
from whet.observe.metrics import flatten, merge_metrics
from whet.observe.peaks import Peak, memory

CPU = torch.device("cpu")


class Model:
    flops = 7


def meter(**settings):
    now = iter(range(0, 100, 2))
    return Meter(Devices(**settings), clock=lambda: next(now))


def run(found, phase, flops):
    model = Model()
    with found.phase(phase, model):
        model.flops += flops


def test_phases_are_told_by_their_sums():
    found = meter(count=4, peak_tflops=0.5)
    run(found, "update", 3_000_000_000_000)
    run(found, "update", 1_000_000_000_000)
    run(found, "ref_logprobs", 500_000_000_000)
    values = flatten(found.take())
    assert values["tflop/update"] == 4.0 and values["tflop/ref_logprobs"] == 0.5
    assert values["tflop_per_device_s/update"] == 4.0 / (4 * 4)
    assert values["tflop_per_device_s/ref_logprobs"] == 0.5 / (2 * 4)
    assert values["train/mfu"] == 4.0 / (4 * 4) / 0.5
    assert found.take() == {}


def test_without_a_known_peak_there_is_no_mfu():
    found = meter()
    run(found, "update", 10)
    assert "train/mfu" not in found.take()


def test_a_phase_that_raises_counts_nothing():
    found = meter()
    with pytest.raises(KeyError), found.phase("update", Model()):
        raise KeyError
    assert found.take() == {}


def held(size):
    return torch.ones(size // 4).sum()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_each_phase_has_a_peak_of_its_own():
    size = 200 * 2**20
    if not Peak(CPU).known:
        pytest.skip("this sandbox keeps the kernel's peak")
    now = flatten(memory())["memory/rss_gib"]
    found = meter()
    with found.phase("update", Model()):
        held(size)
    with found.phase("values", Model()):
        pass
    values = flatten(found.take())
    assert values["memory/update_peak_gib"] - now == pytest.approx(size / 2**30, rel=0.1)
    assert values["memory/values_peak_gib"] - now < 0.1 * size / 2**30
    assert flatten(memory())["memory/rss_peak_gib"] >= values["memory/update_peak_gib"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_of_who_started_a_process_is_not_its_own():
    mine = bytearray(2**30)
    told = "from whet.observe import metrics, peaks; print(metrics.flatten(peaks.memory())['memory/rss_peak_gib'])"
    peak = float(subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout)
    assert 0.05 < peak < len(mine) / 2**30


def test_a_peak_that_cannot_begin_anew_is_not_told(monkeypatch, tmp_path):
    monkeypatch.setattr(peaks, "CLEAR", tmp_path / "nothing" / "here")
    found = meter()
    run(found, "update", 1)
    assert not any(name.startswith("memory/") for name in found.take())


def test_the_peak_of_a_gpu(monkeypatch):
    told = {"peak": 3 * 2**30, "waited": 0}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: told["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: told.update(peak=2**30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.update(waited=told["waited"] + 1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(peaks, "_forgotten", {"rss": 0, "cuda": 0})
    found = meter(kind=torch.device("cuda"))
    run(found, "update", 1)
    assert (flatten(found.take())["memory/update_peak_gib"], told["waited"]) == (1.0, 1)
    assert flatten(memory())["memory/cuda_peak_gib"] == 3.0


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A10", 125, 31.2),
        ("NVIDIA A10G", None, None),
        ("NVIDIA H100 80GB HBM3", 989.5, 67),
        ("NVIDIA H100 PCIe", 756.5, 51),
        ("NVIDIA H200", 989.5, 67),
        ("NVIDIA L40S", 362, 91.6),
        ("Tesla V100-SXM2-32GB", None, 15.7),
        ("NVIDIA GB200", 2500, 80),
        ("a card of tomorrow", None, None),
    ],
)
def test_data_sheets_are_found_by_name(name, bfloat16, float32):
    assert (peak_tflops(name, torch.bfloat16), peak_tflops(name, torch.float32)) == (bfloat16, float32)
    assert peak_tflops(name, torch.float16) == bfloat16
    assert peak_tflops(name, torch.float64) is None


def test_products_that_may_use_other_units_have_no_peak(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_tflops("NVIDIA H100 80GB HBM3", torch.float32) is None


def test_metrics_of_steps_merge():
    a, b = meter(), meter()
    run(a, "update", 10**12)
    run(b, "update", 3 * 10**12)
    assert flatten(merge_metrics(a.take(), b.take()))["tflop_per_device_s/update"] == 1.0
