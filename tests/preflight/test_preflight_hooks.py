"""Functions of a user's are found before a run, and what is wrong with them is told by key."""

from __future__ import annotations

import pytest
from small_run import look, module, of

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
