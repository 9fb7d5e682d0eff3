"""Facts of the machine: versions, processors, memory, accelerators, threads. Plain values, for a report or a
record.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from whet.types import JSON

if TYPE_CHECKING:
    import torch

PACKAGES = (
    "whet", "torch", "transformers", "tokenizers", "huggingface-hub", "safetensors", "jinja2", "numpy", "pyarrow", "pydantic", "typer",
    "rich", "math-verify",
)  # fmt: skip
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PROC_BIND")
NO_LIMIT = 2**60
"""Numbers from here on, and `max`, stand for a control group without a limit."""


def machine() -> dict[str, JSON]:
    """Versions, platform, processor, memory, threads and accelerators. Needs a torch that can be imported."""
    import torch

    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "versions": versions(PACKAGES),
        "cpu": {"model": cpu_model(), "cores": usable_cores(), "capability": torch.backends.cpu.get_cpu_capability()},
        "memory_bytes": memory_limit()[0],
        "threads": {"torch": torch.get_num_threads(), **{name: os.environ.get(name) for name in THREAD_VARIABLES}},
        "torch_cuda": torch.version.cuda,
        "accelerators": accelerators(),
    }


def versions(names: tuple[str, ...]) -> dict[str, str | None]:
    """Installed versions by package; None: not installed."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def accelerators() -> list[dict[str, JSON]]:
    """Devices that torch sees in addition to the CPU, each with its memory."""
    import torch

    found: list[dict[str, JSON]] = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        found.append({"device": f"cuda:{index}", "name": facts.name, "memory_bytes": facts.total_memory})
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": "Apple GPU", "memory_bytes": torch.mps.recommended_max_memory()})
    return found


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of the processor."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def usable_cores(root: Path = Path("/")) -> int:
    """Number of cores that this process may use: limited by its affinity, and by its control group's share of
    time.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for text in _group_files(root, "cpu.max"):
        quota, _, period = text.partition(" ")
        if quota != "max":
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes of memory that this process may use, and their source: the machine, or a lower limit of a control
    group.
    """
    limit, source = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "physical memory"
    for text in _group_files(root, "memory.max", {"memory": "memory.limit_in_bytes"}):
        if text != "max" and int(text) < min(limit, NO_LIMIT):
            limit, source = int(text), "the control group's memory limit"
    return limit, source


def _group_files(root: Path, unified: str, legacy: Mapping[str, str] | None = None) -> list[str]:
    """Contents of a file of this process's control group and of the groups above it.

    Args:
        root: root of the file system.
        unified: the file's name where there is one hierarchy of control groups (version 2).
        legacy: its names by controller where each controller has a hierarchy of its own (version 1).
    """
    listing = root / "proc/self/cgroup"
    if not listing.exists():
        return []
    names = {"": unified, **(legacy or {})}
    found: list[str] = []
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            if controller in names:
                base = root / "sys/fs/cgroup" / controller
                folders = [base / path.lstrip("/"), *(base / path.lstrip("/")).parents]
                files = [folder / names[controller] for folder in folders if folder.is_relative_to(base)]
                found += [file.read_text().strip() for file in files if file.is_file()]
    return found


def device_memory(device: torch.device) -> tuple[int, str]:
    """Bytes of the device's memory, and their source in words."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory, "memory"
    if device.type == "mps":
        return torch.mps.recommended_max_memory(), "recommended memory"
    return memory_limit()
