import sys
from pathlib import Path

import pytest
import torch

from whet.observe import peaks
from whet.observe.metrics import Mean, flatten, merge_metrics
from whet.observe.peaks import memory
from whet.observe.spans import Phases


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def spend(phases, clock, name, seconds):
    with phases.span(name):
        clock.now += seconds


def test_a_step_is_its_phases_and_the_rest(clock):
    phases = Phases(clock=clock)
    with phases.span("rollout"):
        clock.now += 1.0
        spend(phases, clock, "engine", 2.0)
        spend(phases, clock, "engine", 0.5)
    clock.now += 0.25
    spend(phases, clock, "update", 4.0)
    assert flatten(phases.take()) == {
        "time/rollout/engine_s": 2.5,
        "time/rollout_s": 3.5,
        "time/update_s": 4.0,
        "time/step_s": 7.75,
        "time/other_s": 0.25,
    }


def test_the_next_step_begins_where_the_last_one_ended(clock):
    phases = Phases(clock=clock)
    spend(phases, clock, "rollout", 1.0)
    phases.take()
    clock.now += 3.0
    assert flatten(phases.take()) == {"time/step_s": 3.0, "time/other_s": 3.0}


def test_tokens_per_second_merge_exactly(clock):
    phases = Phases(clock=clock)
    spend(phases, clock, "rollout", 1.0)
    phases.add_tokens("rollout", 60)
    phases.add_tokens("rollout", 40)
    first = phases.take()
    assert first["tokens_per_second/rollout"] == Mean(100, 1.0)
    spend(phases, clock, "rollout", 3.0)
    phases.add_tokens("rollout", 100)
    both = flatten(merge_metrics(first, phases.take()))
    assert both["tokens_per_second/rollout"] == 50.0  # the mean of the two rates would be 66.7
    assert both["time/rollout_s"] == both["time/step_s"] == 4.0


def test_a_phase_that_fails_is_timed_and_closed(clock):
    phases = Phases(clock=clock)
    with pytest.raises(RuntimeError, match="lost"), phases.span("rollout"), phases.span("engine"):
        clock.now += 2.0
        raise RuntimeError("lost")
    spend(phases, clock, "update", 1.0)
    values = flatten(phases.take())
    assert (values["time/rollout_s"], values["time/rollout/engine_s"], values["time/update_s"]) == (2.0, 2.0, 1.0)


def test_on_enter_hears_every_phase(clock):
    heard = []
    phases = Phases(on_enter=heard.append, clock=clock)
    with phases.span("rollout"), phases.span("engine"):
        pass
    with phases.span("update"):
        pass
    assert heard == ["rollout", "rollout/engine", "update"]


def test_misuse_is_named(clock):
    phases = Phases(clock=clock)
    for name in ("", "a/b", "step", "other"):
        with pytest.raises(ValueError, match="cannot be named"), phases.span(name):
            pass
    with phases.span("rollout"), pytest.raises(ValueError, match="inside phase 'rollout'"):
        phases.take()
    phases.add_tokens("rolout", 3)
    with pytest.raises(ValueError, match=r"counted for \['rolout'\], but the phases timed are \['rollout'\]"):
        phases.take()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_the_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(peaks, "_forgotten", {"rss": 0})
    values = flatten(memory())
    told = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    peak = int(told.split()[1]) / 2**20
    assert set(values) == {"memory/rss_gib", "memory/rss_peak_gib"}
    assert values["memory/rss_peak_gib"] == pytest.approx(peak, rel=0.02)
    assert 0.02 < values["memory/rss_gib"] <= peak * 1.02


def test_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3 * 2**29)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**31)
    monkeypatch.setattr(peaks, "_forgotten", {"rss": 0, "cuda": 0})
    values = flatten(memory())
    assert (values["memory/cuda_gib"], values["memory/cuda_peak_gib"]) == (1.5, 2.0)
