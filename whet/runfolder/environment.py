"""Versions, the machine, and the switches that decide a run's bits. It names no host and no user."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

from whet.runfolder.machine import cpu_model, versions
from whet.types import JSON

PACKAGES = ("whet", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pydantic")
GIB = 2**30
EXACT = (
    "versions.whet",
    "versions.python",
    "versions.torch",
    "versions.transformers",
    "versions.tokenizers",
    "versions.numpy",
    "versions.cuda",
    "versions.cudnn",
    "platform.system",
    "platform.machine",
    "platform.libc",
    "cpu.model",
    "cpu.capability",
    "cpu.threads",
    "accelerators",
    "deterministic",
)
"""Keys whose change can change a run's bits: other arithmetic, other kernels, another order of
additions. (The number of cores does not: the number of threads does.)"""


def environment() -> dict[str, JSON]:
    """The environment of this process now, as JSON: `versions`, `platform`, `cpu`, `accelerators`, `deterministic`."""
    import torch

    return {
        "versions": {
            "python": platform.python_version(),
            **versions(PACKAGES),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        },
        "platform": {
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip(),
        },
        "cpu": {
            "model": cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        },
        "accelerators": [_accelerator(torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count())],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def differences(old: Mapping[str, JSON], new: Mapping[str, JSON]) -> list[str]:
    """Differences between two environments that matter to bit-exactness, a line for each: `torch 2.13.0
    (was 2.11.0)`."""
    lines: list[str] = []
    for key in EXACT:
        before, now = (_look_up(tree, key) for tree in (old, new))
        if before != now:
            lines.append(f"{key.removeprefix('versions.').replace('.', ' ')} {_text(now)} (was {_text(before)})")
    return lines


def _accelerator(found: Any) -> dict[str, JSON]:
    return {"name": found.name, "capability": f"{found.major}.{found.minor}", "memory_gib": round(found.total_memory / GIB, 1)}


def _look_up(tree: JSON, key: str) -> JSON:
    """The value at a dotted key; None where a file of an older version does not have it."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, Mapping) else None
    return tree


def _text(value: JSON) -> str:
    if value is None or value == []:
        return "none"
    return ", ".join(f"{item['name']} ({item['memory_gib']} GiB)" for item in value) if isinstance(value, list) else str(value)
