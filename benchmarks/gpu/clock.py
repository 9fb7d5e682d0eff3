"""Seconds of work on a device, which is waited for; kernels and waits that a profile saw; memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaLaunchCooperativeKernel")
"""What the names of calls that start kernels begin with; one launch of a graph starts all of its kernels."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
COPIES = ("cudaMemcpy",)


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def once(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call."""
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def seconds(work: Callable[[], object], device: torch.device, rounds: int = 5, calls: int = 1) -> float:
    """Median seconds of a call, of rounds of so many; one call warms up."""
    work()

    def several() -> None:
        for _ in range(calls):
            work()

    return median(once(several, device) for _ in range(rounds)) / calls


def profiled(work: Callable[[], object], device: torch.device, calls: int) -> dict[str, Any]:
    """What one of so many calls launches and waits for, and the kernels that take most of its time."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    wait(device)
    with profile(activities=activities) as found:
        for _ in range(calls):
            work()
        wait(device)
    counts = {"operators": 0, "launches": 0, "waits": 0, "copies": 0}
    kernels: dict[str, float] = {}
    for event in found.key_averages():
        counts["operators"] += event.count if event.key.startswith("aten::") else 0
        for kind, names in (("launches", LAUNCHES), ("waits", WAITS), ("copies", COPIES)):
            counts[kind] += event.count if event.key.startswith(names) else 0
        spent = getattr(event, "self_device_time_total", 0)  # of torch that counts devices' time
        if spent and not event.key.startswith("aten::"):
            kernels[event.key[:90]] = spent / 1e6 / calls
    counts["waits"] = max(counts["waits"] - (device.type == "cuda"), 0)  # the one of `wait`
    out: dict[str, Any] = {f"{kind}_each": round(num / calls, 1) for kind, num in counts.items()}
    if device.type != "cuda":
        out = {"operators_each": out["operators_each"]}
    if kernels:
        most = sorted(kernels.items(), key=lambda item: -item[1])
        out["device_seconds_each"] = round(sum(kernels.values()), 6)
        out["kernels"] = {name: round(spent, 7) for name, spent in most[:8]}
    return out


def free_gib(device: torch.device) -> float | None:
    """Free memory of a GPU as its driver tells it; None: on others it is not told."""
    return round(torch.cuda.mem_get_info(device)[0] / 2**30, 3) if device.type == "cuda" else None


def forget(device: torch.device) -> None:
    """Give unused memory back, and begin the peak anew."""
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float | None:
    """The most that torch held since `forget`; None: not known."""
    return round(torch.cuda.max_memory_allocated(device) / 2**30, 3) if device.type == "cuda" else None
