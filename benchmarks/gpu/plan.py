"""The table of sections and their deadlines. Nothing here imports torch: the parent reads it."""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_S = 540.0
"""Deadline of the whole command."""
STATUSES = ("ok", "failed", "not run", "not reached")
"""A case's: `not run` comes with its reason; `not reached`: the section ended before it."""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the check, run by a process of its own."""

    name: str
    module: str
    """Where it is, with its package."""
    limit_s: float
    title: str


SECTIONS = (
    Section("machine", "gpu.ceilings", 15, "versions; what the device copies and multiplies at best"),
    Section("cuda-tests", "gpu.suite_cuda", 60, "tests of what only CUDA has (tests/gpu)"),
    Section("device-tests", "gpu.suite_device", 60, "tests that take a device (WHET_TEST_DEVICE)"),
    Section("attention", "gpu.attention", 30, "the attention kernel of each shape, cuDNN on and off, and what a new shape costs"),
    Section("flex", "gpu.flex", 40, "forest rows by flex_attention beside chains; compile seconds and recompiles"),
    Section("decode", "gpu.decode", 110, "decode steps: tokens per second, launches and synchronisations, share of the copy"),
    Section("grpo", "gpu.grpo", 90, "whole GRPO steps, beside TRL where it is installed"),
    Section("deterministic", "gpu.deterministic", 45, "a deterministic GRPO run, twice"),
    Section("update", "gpu.update", 35, "an update on one long row: MFU, and peak memory beside the plan"),
    Section("sync", "gpu.sync", 45, "weights to a process on the same device by each transport; memory before, in and after sleep"),
)
