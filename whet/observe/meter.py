"""Cost of models' passes, by phase: floating-point operations, their rate, the peak of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from whet.observe.metrics import Max, Mean, Metrics, Total, merge_metrics
from whet.observe.peaks import GIB, Peak

TERA = 1e12
CPU = torch.device("cpu")
UPDATE = "update"
"""The phase in which the policy learns, for which MFU is reported."""


class Counting(Protocol):
    """A model that counts what it computes."""

    @property
    def flops(self) -> int:
        """Floating-point operations that its passes needed so far, those of all processes together."""
        ...


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that compute."""

    kind: torch.device = CPU
    count: int = 1
    peak_tflops: float | None = None
    """Peak rate of each device in 1e12 operations a second; None: not known, and MFU is not reported."""


class Meter:
    """Watches phases, one after another.

    Args:
        devices: devices that the models compute on.
        clock: gives seconds.
    """

    def __init__(self, devices: Devices, clock: Callable[[], float] = time.perf_counter) -> None:
        self.devices = devices
        self._clock = clock
        self._found: Metrics = {}

    @contextmanager
    def phase(self, name: str, model: Counting) -> Iterator[None]:
        """Watch the body, in which `model` alone computes. Nothing is counted where it raises."""
        peak, before, began = Peak(self.devices.kind), model.flops, self._clock()
        yield
        if self.devices.kind.type == "cuda":
            torch.cuda.synchronize(self.devices.kind)
        tflop, seconds = (model.flops - before) / TERA, self._clock() - began
        rate = Mean(tflop, seconds * self.devices.count)
        found: Metrics = {f"tflop/{name}": Total(tflop), f"tflop_per_device_s/{name}": rate}
        if name == UPDATE and self.devices.peak_tflops is not None:
            found["train/mfu"] = Mean(tflop, rate.count * self.devices.peak_tflops)
        if peak.known:
            found[f"memory/{name}_peak_gib"] = Max(peak.size_bytes / GIB)
        self._found = merge_metrics(self._found, found)

    def take(self) -> Metrics:
        """Measurements since the last call: `tflop/<phase>`, `tflop_per_device_s/<phase>`,
        `memory/<phase>_peak_gib`, `train/mfu`."""
        found, self._found = self._found, {}
        return found
