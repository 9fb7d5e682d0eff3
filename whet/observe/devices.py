"""Peak rates of devices by their makers' data sheets, the reference of model FLOPs utilization (MFU)."""

from __future__ import annotations

import re

import torch

PEAK_TFLOPS: dict[str, tuple[float | None, float]] = {
    "GB200": (2500, 80),
    "B200": (2250, 75),
    "H200 NVL": (835.5, 60),
    "H200": (989.5, 67),
    "H100 PCIe": (756.5, 51),
    "H100 NVL": (835.5, 60),
    "H100": (989.5, 67),
    "H800": (989.5, 67),
    "H20": (148, 44),
    "A100": (312, 19.5),
    "A800": (312, 19.5),
    "A40": (149.7, 37.4),
    "A30": (165, 10.3),
    "A10": (125, 31.2),
    "L40S": (362, 91.6),
    "L40": (181, 90.5),
    "L4": (121, 30.3),
    "V100-SXM2": (None, 15.7),
    "V100-PCIE": (None, 14.0),
    "T4": (None, 8.1),
    "MI325X": (1307.4, 163.4),
    "MI300X": (1307.4, 163.4),
}
"""A part of a device's name; 1e12 dense operations a second, in 16 bits (None: it has no units for bfloat16) and in float32. The first
that fits counts. Sources: the data sheets of NVIDIA (numbers with sparsity are halved) and AMD."""


def peak_tflops(name: str, dtype: torch.dtype) -> float | None:
    """1e12 operations a second that a device can do at most. None: that is not known.

    Args:
        name: as torch has it (`torch.cuda.get_device_name`).
        dtype: type of the computation. Products of float32 may be set to take other units (TF32); what these can do is not looked up.
    """
    whole = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    half = dtype.itemsize == 2
    if not half and not whole:
        return None
    for part, (of_half, of_float32) in PEAK_TFLOPS.items():
        if re.search(rf"\b{re.escape(part)}\b", name):
            return of_half if half else of_float32
    return None
