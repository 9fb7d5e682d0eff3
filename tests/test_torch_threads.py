"""Torch's threads beside other work: they sleep while they wait, and a run that they slow down says so."""

import os
import subprocess
import sys

import pytest

from whet.threads import STEPS, ThreadWatch, slowdown


def policy_of_a_process(**environment: str) -> str:
    """What the OpenMP library says of itself in a process that loads whet, then torch."""
    inherited = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    told = subprocess.run(
        [sys.executable, "-c", "import whet, torch"],
        env={**inherited, "OMP_DISPLAY_ENV": "TRUE", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return next(line for line in told.stderr.splitlines() if "OMP_WAIT_POLICY" in line).partition("=")[2].strip(" '")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another OpenMP library")
def test_threads_sleep_while_they_wait_unless_the_user_says_otherwise():
    assert policy_of_a_process() == "PASSIVE"
    assert policy_of_a_process(OMP_WAIT_POLICY="ACTIVE") == "ACTIVE"


def test_one_thread_is_not_measured_and_several_give_a_ratio():
    assert slowdown(1) == 1.0
    assert slowdown(2, seconds=0.01) > 0


def test_a_start_whose_threads_are_slower_than_one_is_told():
    assert ThreadWatch(on_cpu=True, measure=lambda: 1.3).at_start() == []
    assert ThreadWatch(on_cpu=False, measure=lambda: 9.0).at_start() == []
    (line,) = ThreadWatch(on_cpu=True, measure=lambda: 9.0).at_start()
    assert "take 9.0 times as long as one" in line and "threads=1" in line


def test_a_step_that_slows_down_is_measured_and_told_once():
    measured = []
    watch = ThreadWatch(on_cpu=True, measure=lambda: measured.append(1) or 6.0)
    for _ in range(STEPS):
        assert watch.after_step({"tokens_per_second/update": 100.0, "reward/total": 0.5}) == []
    assert watch.after_step({"tokens_per_second/update": 60.0}) == [] and not measured
    (line,) = watch.after_step({"tokens_per_second/update": 30.0})
    assert line.startswith("tokens_per_second/update fell from 100 to 30: ") and len(measured) == 1
    assert watch.after_step({"tokens_per_second/update": 10.0}) == []


def test_a_slow_step_of_another_cause_is_not_blamed_on_threads():
    watch = ThreadWatch(on_cpu=True, measure=lambda: 0.6)
    for _ in range(STEPS):
        watch.after_step({"tokens_per_second/rollout": 100.0})
    assert watch.after_step({"tokens_per_second/rollout": 5.0}) == []
