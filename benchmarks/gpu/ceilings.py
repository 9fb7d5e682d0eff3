"""Versions, and what the device does at best: a copy within its memory, and a product of large matrices in bfloat16."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from gpu.clock import seconds
from gpu.record import Case

SIZES = {"small": (2**24, 256), "full": (2**32, 8192)}
"""Bytes of a copy, and rows and columns of a matrix."""
PACKAGES = ("torch", "triton", "transformers", "flash-attn", "flashinfer-python", "trl", "peft", "torchao", "vllm", "numpy", "pydantic")


def cases(sizes: str, device: torch.device) -> list[Case]:
    size_bytes, side = SIZES[sizes]
    return [
        Case("versions", lambda: versions(device)),
        Case("copy", lambda: {"gb_per_s": copy_gb_per_s(device, size_bytes), "bytes": size_bytes}),
        Case("product", lambda: {"tflops_bf16": product_tflops(device, side), "side": side}),
    ]


def versions(device: torch.device) -> Mapping[str, Any]:
    """Packages, driver, and what the device is."""
    found: dict[str, Any] = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version(), "cuda": torch.version.cuda}
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found |= {"device": facts.name, "gib": round(facts.total_memory / 2**30, 1), "capability": f"{facts.major}.{facts.minor}"}
        found |= {"devices": torch.cuda.device_count(), "cudnn": torch.backends.cudnn.version()}
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
        found["nvidia_smi"] = subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip()
    return found


def copy_gb_per_s(device: torch.device, size_bytes: int = SIZES["full"][0]) -> float:
    """Bytes read and written by a copy on the device, in a second."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return round(2 * size_bytes / seconds(lambda: target.copy_(source), device, rounds=5, calls=4) / 1e9, 1)


def product_tflops(device: torch.device, side: int) -> float:
    """Operations of a product of two square matrices in bfloat16, 1e12 a second."""
    a, b = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    return round(2 * side**3 / seconds(lambda: a @ b, device, rounds=5, calls=4) / 1e12, 4)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
