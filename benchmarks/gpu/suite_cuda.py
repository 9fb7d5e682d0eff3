"""The tests of what only CUDA has (`tests/gpu`); without CUDA each of them is named as not run."""

from __future__ import annotations

import torch

from gpu.record import Record
from gpu.suite import run_tests

FILES = ("tests/gpu/test_gpu_engine.py", "tests/gpu/test_gpu_weights.py", "tests/gpu/test_gpu_attention.py")


def run(record: Record, sizes: str, device: torch.device, end: float) -> None:
    run_tests(record, device, FILES, end)
