"""Functions of a user's are found before a run, and what is wrong with them is told by key."""

from __future__ import annotations

import pytest

from tests.check.small_run import look, module, of

CODE = """
    async def play(run, env):
        return "completed"

    def process(samples, groups):
        raise AssertionError("check calls no hook")

    def told(rollout_id, groups):
        return None
"""


def test_where_there_are_none_that_is_said(here):
    findings, _ = look("hooks")
    assert of(findings, "hooks") == ["none: every step of a rollout is whet's own"]


def test_each_is_found_and_none_is_called(here):
    path = module(here, "hooked.py", CODE)
    findings, _ = look("hooks", overrides=[f"rollout.play={path}:play", f"batch.process={path}:process"])
    assert of(findings, "hooks", "ok") == [
        f"rollout.play {path}:play can be called as f(run, env)",
        f"batch.process {path}:process can be called as f(samples, groups)",
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.play={}:process", "rollout.play '{}:process' is a plain function; write it with `async def`"),
        ("rollout.play={}:plays", "has no 'plays'; did you mean play?"),
        ("batch.process={}:play", "batch.process '{}:play' is an async function; write it with plain `def`"),
        ("observe.on_rollout={}:told", "observe.on_rollout '{}:told' cannot be called as f(rollout_id, groups, dropped, metrics)"),
        ("batch.process=no_such_module:f", "batch.process 'no_such_module:f': no module named"),
    ],
)
def test_what_is_wrong_is_told_by_key(here, override, words):
    path = module(here, "hooked.py", CODE)
    findings, _ = look("hooks", overrides=[override.format(path)])
    (text,) = of(findings, "hooks", "FAIL")
    assert words.format(path) in text


SOURCE = """
    from whet.types import Task

    class Sums:
        epoch = 0
        def __init__(self, seed, keep=True):
            self.taken, self.keep = 0, keep
        def __len__(self):
            return 100
        def next(self, n):
            self.taken += n
            return [self.find(str(i)) for i in range(self.taken - n, self.taken)]
        def find(self, task_id):
            return Task(task_id, f"What is {task_id} + 1?", str(int(task_id) + 1), origin=f"sum {task_id}")
        def state(self):
            return {"taken": self.taken}
        def restore(self, state):
            if self.keep:
                self.taken = state["taken"]
"""
AREAS = ("batch", "model", "tokenizer", "environment", "data", "reward", "length", "resume")


def test_a_source_of_one_s_own_is_tried_out(here):
    path = module(here, "sums.py", SOURCE)
    findings, context = look(*AREAS, overrides=["data.train=none", f"data.source={path}:Sums"])
    assert not [f for f in findings if f.status == "FAIL"], findings
    assert of(findings, "data")[0] == f"data.source {path}:Sums has 100 tasks an epoch; 64 tasks taken, found again and given again"
    assert of(findings, "environment")[0] == "environment 'tools' started with sum 0 and closed"
    assert "3 rollouts of 4 prompts, 0.12 passes over 100" in of(findings, "length")[0]
    assert context.source is not None and context.source.next(1)[0].id == "0", "it is as it was before"


@pytest.mark.parametrize(
    ("name", "words"), [("Sums", "gives '64' after a restore where it gave '0' before"), ("Sum", "did you mean Sums?")]
)
def test_a_source_that_breaks_its_protocol_is_told(here, name, words):
    path = module(here, "sums.py", SOURCE)
    findings, _ = look(*AREAS, overrides=["data.train=none", f"data.source={path}:{name}", "data.source_options={keep=false}"])
    assert words in of(findings, "data", "FAIL")[0]
