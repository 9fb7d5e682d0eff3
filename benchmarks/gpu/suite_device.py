"""The tests whose models lie on the device that WHET_TEST_DEVICE names. The others compute on the CPU alone, and are named by file."""

from __future__ import annotations

import torch

from gpu.record import Record
from gpu.suite import ROOT, run_tests

FILES = (
    "tests/engine/test_engine_exact.py",
    "tests/train/test_train_backend.py",
    "tests/engine/test_engine_static.py",
    "tests/engine/test_engine_sleep.py",
    "tests/engine/test_engine_publish.py",
    "tests/transport/test_transports.py",
    "tests/train/test_train_grpo_step.py",
    "tests/model/test_model_attention.py",
    "tests/model/test_model_scalar.py",
    "tests/train/test_train_scalar.py",
    "tests/train/test_train_lora.py",
    "tests/engine/test_engine_options.py",
    "tests/engine/test_engine_rows.py",
    "tests/train/test_train_forest_rows.py",
)
"""In the order in which they run, should the time not be enough."""
SMALL = ("tests/engine/test_engine_static.py", "tests/model/test_model_attention.py", "tests/engine/test_engine_sleep.py")


def run(record: Record, sizes: str, device: torch.device, end: float) -> None:
    chosen = FILES if sizes == "full" else SMALL
    others = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "gpu")
    reasons: dict[str, str] = dict.fromkeys(FILES, "it is not in the small form")
    left_out = {path: reasons.get(path, "its models are on the CPU whatever the device") for path in others}
    record.facts["left_out"] = {path: reason for path, reason in left_out.items() if path not in chosen}
    run_tests(record, device, chosen, end)
