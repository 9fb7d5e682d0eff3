"""Every section of the command that checks a GPU runs in its small form on a CPU, and whatever is not run there is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


PATIENT = """
import sys
sys.path.insert(0, {benchmarks!r})
from dataclasses import replace
from pathlib import Path
from check_gpu import check
from gpu.plan import SECTIONS
sections = [replace(section, limit_s=4 * section.limit_s) for section in SECTIONS]  # a busy machine is slower than any GPU's
folder = Path({folder!r})
raise SystemExit(check(folder / "out", sections, None, None, "auto", folder / "site", 800.0))
"""


@pytest.mark.slow
@pytest.mark.timeout(850)
def test_the_small_form_runs_on_a_cpu(tmp_path):
    (tmp_path / "site").mkdir()
    script = PATIENT.format(benchmarks=str(ROOT / "benchmarks"), folder=str(tmp_path))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    found = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=830)
    merged = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found.returncode == 0 and merged["failed"] == [], found.stdout[-8000:]
    assert {section["status"] for section in merged["sections"].values()} == {"ok"}
    for name, section in merged["sections"].items():
        assert section["device"] == "cpu" and section["sizes"] == "small" and section["machine"]["torch"], name
        assert section["cases"] and "not reached" not in {case["status"] for case in section["cases"].values()}, name
    marked = merged["sections"]["cuda-tests"]["cases"]
    assert len(marked) > 50 and {case["status"] for case in marked.values()} == {"not run"}
    assert {case["reason"] for case in marked.values()} == {"needs CUDA", "needs 2 CUDA devices"}
    told = {(row["section"], row["case"]): row["reason"] for row in merged["not_run"]}
    assert all(told["cuda-tests", name] == case["reason"] for name, case in marked.items())
    assert told["device-tests", "tests/config/test_config_load.py"] == "its models are on the CPU whatever the device"
    assert all(reason for reason in told.values())
    for name, keys in {"decode": {"tokens_per_s", "share_of_copy"}, "deterministic": {"equal"}, "sync": set()}.items():
        for case, each in merged["sections"][name]["cases"].items():
            assert each["status"] == "ok" and keys <= each["numbers"].keys(), (name, case)
    updates = {case: each["numbers"] for case, each in merged["sections"]["update"]["cases"].items()}
    for case, numbers in updates.items():
        assert numbers["planned_peak_gib"] > 0 if case.startswith("plan of") else numbers["tflops"] > 0, case
