"""A run whose engine loses a process in a rollout: it goes on, or ends with the cause and goes on when it is started again."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import pytest

from tests.e2e.test_engine_copies_run import workers_of_this_process
from tests.e2e.tiny_run import make_files, metrics_of, run_config, weights_of
from whet.engine.base import EngineFailed
from whet.engine.pool.config import Supervision
from whet.engine.pool.reply import PooledReply
from whet.engine.workers.copies import EngineCopies
from whet.observe.records import read_records
from whet.runs.commands import train

pytestmark = pytest.mark.long

ENGINE = {"embedded": {"copies": 2, "cache_tokens": 2048}, "pool": {"restarts": 3}}
LONG = {"max_turn_tokens": 90, "max_tokens": 200}


@contextmanager
def killing(at_chunk):
    """Kill the first copy, once, when so many chunks have come."""
    engines, seen = [], []
    make, take = EngineCopies.__init__, PooledReply.take

    def made(self, *args, **more):
        make(self, *args, **more)
        engines.append(self)

    def taken(self, chunk):
        seen.append(chunk)
        if len(seen) == at_chunk:
            os.kill(engines[-1].members[0]._links[0].process.child.pid, signal.SIGKILL)
        return take(self, chunk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCopies, "__init__", made)
        patch.setattr(PooledReply, "take", taken)
        patch.setattr(Supervision, "of", lambda config: Supervision(**config.model_dump(), restart_backoff_s=0.01))  # runs are that short
        yield
    assert len(seen) >= at_chunk, "nothing was killed"


def replies_of(folder, rollout):
    rows = [row for row in read_records(folder / "rollouts") if row["rollout_id"] == rollout]
    return {row["trajectory"]: [turn["content"] for turn in row["turns"]] for row in rows}


def test_a_run_goes_on_when_a_copy_is_killed_in_a_rollout(tmp_path, capsys):
    make_files(tmp_path)
    settings = {"deterministic": False, "engine": ENGINE, "rollout": LONG, "num_rollouts": 2, "model": {"dtype": "float64"}}
    train(run_config(tmp_path, "whole", **settings))
    with killing(at_chunk=2):
        train(run_config(tmp_path, "killed", **{**settings, "observe": {"display": "plain"}}))
    lines = metrics_of(tmp_path / "killed")
    assert [line["run/version"] for line in lines if "run/version" in line] == [1, 2]
    assert sum(line["engine/restarts"] for line in lines) == 1 and all(line["engine/members_up"] >= 1 for line in lines)
    assert sum(line["engine/retried_requests"] for line in lines) >= 1
    assert all(line["outcome/failed"] == 0 for line in lines)
    assert replies_of(tmp_path / "killed", 0) == replies_of(tmp_path / "whole", 0), "under one version nobody can tell"
    assert len(replies_of(tmp_path / "killed", 1)) == 6
    (kept,) = (tmp_path / "killed/failures").iterdir()
    text = kept.read_text()
    assert kept.name == "1_engine_copy_0.txt" and "engine copy 0 died (killed by signal 9)" in text
    assert all(words in text for words in ("phase: rollout", "tokens of context", "stacks of this process", "most recent call first"))
    said = "engine copy 0 died (killed by signal 9); it is started again (1 of 3); its requests go on elsewhere; see "
    assert f"{said}{kept}\n" in capsys.readouterr().err
    assert workers_of_this_process() == []


@pytest.mark.slow
def test_in_deterministic_mode_a_killed_copy_ends_the_run_and_the_same_command_gives_the_same_bits(tmp_path):
    make_files(tmp_path)
    settings = {"engine": ENGINE, "rollout": LONG, "num_rollouts": 2}
    train(run_config(tmp_path, "whole", **settings))
    with killing(at_chunk=9), pytest.raises(EngineFailed, match=r"engine copy 0 died \(killed by signal 9\)(?s:.*)With deterministic=true"):
        train(run_config(tmp_path, "parts", **settings))
    assert workers_of_this_process() == []
    train(run_config(tmp_path, "parts", **settings))
    assert weights_of(tmp_path / "parts") == weights_of(tmp_path / "whole")
