"""Memory of this process: now, at its peak, and at the peak since somebody began to look."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

from whet.observe.metrics import Last, Max, Metrics

GIB = 2**30
CLEAR = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")
FORGET_PEAK = "5"
"""Value for /proc/self/clear_refs that resets the kernel's peak of resident memory (proc(5))."""
_forgotten = {"rss": 0, "cuda": 0}
"""Largest peaks in bytes before a reset: a reset must not lose the peak of the whole process."""


def memory() -> Metrics:
    """Memory of this process in GiB: resident now and at its peak, and what torch holds on the current CUDA device.

    Resident memory now is read from /proc, so it is missing on macOS; Windows has neither.
    """
    metrics: Metrics = {}
    statm = Path("/proc/self/statm")
    if sys.platform != "win32":
        import resource

        if statm.exists():
            num_pages = int(statm.read_text().split()[1])
            metrics["memory/rss_gib"] = Last(num_pages * resource.getpagesize() / GIB)
        metrics["memory/rss_peak_gib"] = Max(max(_resident_peak(), _forgotten["rss"]) / GIB)
    if torch.cuda.is_available():
        metrics["memory/cuda_gib"] = Last(torch.cuda.memory_allocated() / GIB)
        metrics["memory/cuda_peak_gib"] = Max(max(torch.cuda.max_memory_allocated(), _forgotten["cuda"]) / GIB)
    return metrics


class Peak:
    """The most memory from now on: what torch has allocated on a CUDA device; else what is resident of the whole process, the engine in
    it and pages that were freed but not given back included. Another one that begins meanwhile ends it.

    Args:
        device: device that a model computes on.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self.known = _begin_cuda() if self._on_cuda else _begin_resident()
        """True if the peak can be measured here."""

    @property
    def size_bytes(self) -> int:
        assert self.known
        return torch.cuda.max_memory_allocated() if self._on_cuda else _resident_peak()


def _resident_peak() -> int:
    if STATUS.exists() and (found := re.search(r"^VmHWM:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)):
        return int(found[1]) * 1024
    import resource  # under Linux it has at least the peak of the process that started this one

    # Linux counts in KiB, macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _begin_cuda() -> bool:
    _forgotten["cuda"] = max(_forgotten["cuda"], torch.cuda.max_memory_allocated())
    torch.cuda.reset_peak_memory_stats()
    return True


def _begin_resident() -> bool:
    if sys.platform != "linux":
        return False
    before = _resident_peak()
    try:
        CLEAR.write_text(FORGET_PEAK)
    except OSError:  # some sandboxes have no such file, or let nobody write to it
        return False
    _forgotten["rss"] = max(_forgotten["rss"], before)
    return True
