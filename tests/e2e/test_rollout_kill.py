"""Runs with rollouts under way, finished and half finished that are killed or stopped anywhere: relative to the checkpoint that is gone
on from, every task is in exactly one place, nothing trains twice, and what is deterministic stays so to the bit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.test_stop import ask_at
from tests.e2e.tiny_run import HERE, checkpoints_of, make_files, metrics_of, run_config, weights_of
from whet.engine.embedded.core import EngineCore
from whet.observe.records import read_records
from whet.rollout.scheduler import Rollouts
from whet.runs.commands import train
from whet.stop import Stopped
from whet.types import Finish
from whet.types.json_codec import trajectory_from_json

pytestmark = pytest.mark.long

KILLED = -signal.SIGKILL
ASIDE = ("timings", "task_origin")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    make_files(folder)
    (folder / "mine.py").write_text(
        "import asyncio\n"
        "def fussy(group):\n"
        "    return 'fussy' if sum(len(t.response) for t in group.trajectories) % 3 == 0 else None\n"
        "async def slowly(trajectory):\n"
        "    await asyncio.sleep(len(trajectory.response) % 4 * 0.01)\n"
        "    return len(trajectory.response) % 7 / 7\n"
    )
    return folder


def filters(folder):
    return [{"name": "zero_std"}, {"name": f"{folder / 'mine.py'}:fussy"}]


def starts(*each) -> list[int]:
    """The exit status of each start: a configuration, and a moment (step, place, count) or None."""
    told = []
    for config, moment in each:
        names = ("step", "place", "count")
        planted = None if moment is None else {"run": Path(config.run_dir).name, **dict(zip(names, moment, strict=True))}
        told.append([config.model_dump(mode="json"), planted])
    command = [sys.executable, "-m", "tests.e2e.killed_run", json.dumps(told)]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout.splitlines()[-1])
    assert set(statuses) <= {0, KILLED}, done.stderr
    return statuses


def records_of(run_dir: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in ASIDE} for row in read_records(run_dir / "rollouts")]


def check_equal(found: Path, expected: Path) -> None:
    assert metrics_of(found) == metrics_of(expected)
    assert records_of(found) == records_of(expected)
    assert weights_of(found) == weights_of(expected)


def dynamic(folder, name, **changes):
    """Synchronous and deterministic, with filters that drop some groups and more groups played than are wanted."""
    control = {"filters": filters(folder), "over_sample": 1.5}
    return run_config(folder, name, control=control, checkpoint={"interval": 1, "keep": 9}, **changes)


@pytest.fixture(scope="module")
def undisturbed(folder):
    train(dynamic(folder, "undisturbed"))
    found = folder / "undisturbed"
    rows = metrics_of(found)
    assert sum(row.get("groups/dropped/fussy", 0) for row in rows) and sum(row.get("groups/dropped/left_over", 0) for row in rows)
    return found


def test_dynamic_sampling_killed_anywhere_goes_on_bit_for_bit(folder, undisturbed):
    config = dynamic(folder, "again-and-again")
    moments = [(-1, "rollout", 5), (1, "backward", 1), (1, "save", 3), (2, "rollout", 12), (2, "save", 7), (3, "log", 1)]
    statuses = starts(*((config, moment) for moment in moments), (config, None))
    assert statuses == [KILLED] * len(moments) + [0]
    check_equal(folder / "again-and-again", undisturbed)


@pytest.mark.parametrize("count", [3, 25])
def test_dynamic_sampling_stopped_in_a_rollout_goes_on_bit_for_bit(folder, undisturbed, monkeypatch, stop, count):
    config = dynamic(folder, f"stopped-{count}")
    with monkeypatch.context() as patch:
        ask_at(patch, EngineCore, "step", stop, count)
        with pytest.raises(Stopped):
            train(config)
    stop._number = None
    train(config)
    check_equal(folder / f"stopped-{count}", undisturbed)


def overlapping(folder, name, **changes):
    """Two rollouts are under way while a third is trained on; some groups are dropped, rewards take their time."""
    control = {"max_staleness": 2, "filters": filters(folder), "retries": 1}
    reward = {"name": f"{folder / 'mine.py'}:slowly"}
    settings = {"deterministic": False, "num_rollouts": 6, "checkpoint": {"interval": 1, "keep": 9}, **changes}
    return run_config(folder, name, control=control, reward=reward, **settings)


def ledger(run_dir: Path) -> dict[str, list[str]]:
    """Where every task is, relative to the newest checkpoint: what was trained and dropped by then according to the records, and what is
    in its state."""
    newest = run_dir / "checkpoints" / checkpoints_of(run_dir)[-1]
    done = json.loads((newest / "manifest.json").read_text())["progress"]["rollout_id"]
    saved = json.loads((newest / "state.json").read_text())["others"]["rollouts"]
    rows = [row for row in read_records(run_dir / "rollouts") if row["rollout_id"] < done] if done else []
    trained = {(row["rollout_id"], row["task_id"]) for row in rows if row["dropped"] is None}
    again = ("retried", "left_over", "too_old")
    dropped = {(row["rollout_id"], row["task_id"]) for row in rows if row["dropped"] not in (None, *again)}
    told = {
        "trained": [task for _, task in sorted(trained)],
        "dropped": [task for _, task in sorted(dropped)],
        "dropped since": [group["task"] for group in saved["stats"]["groups"] if group["dropped"] not in again],
        "in the state": [play["task"] for play in saved["group_runs"]],
    }
    counts = Counter(task for tasks in told.values() for task in tasks)
    assert set(counts.values()) <= {1}, told
    assert len(counts) == saved["num_started"], "what the source gave is all there"
    assert len(told["trained"]) == 2 * done
    return told


def test_a_full_buffer_killed_anywhere_loses_no_task_and_trains_none_twice(folder):
    config = overlapping(folder, "full-buffer")
    moments = [(2, "rollout", 3), (2, "save", 3), (3, "backward", 1), (3, "save", 7), (4, "step", 1)]
    assert starts(*((config, moment) for moment in moments), (config, None)) == [KILLED] * len(moments) + [0]
    found = [ledger(folder / f"full-buffer.{n}") for n in range(len(moments))]
    assert max(len(told["in the state"]) for told in found) >= 4, "checkpoints did hold rollouts under way"
    end = ledger(folder / "full-buffer")
    assert len(end["trained"]) == 12
    rows = read_records(folder / "full-buffer/rollouts")
    assert all(row["dropped"] or max(row["versions"]) <= row["rollout_id"] for row in rows)
    for told in found:
        assert set(told["trained"]) <= set(end["trained"])
        assert set(told["in the state"]) <= set(end["trained"]) | set(end["dropped"]) | set(end["in the state"])


def test_a_stop_keeps_half_finished_trajectories_and_goes_on_with_their_tokens(folder, monkeypatch, stop):
    """What was sampled of a trajectory by the stop is the beginning of what trains, with its log-probs and versions."""
    config = overlapping(folder, "half", num_rollouts=4, rollout={"max_turn_tokens": 40, "max_tokens": 160})
    with monkeypatch.context() as patch:
        ask_at(patch, EngineCore, "step", stop, 20)  # in the middle of the first turns
        with pytest.raises(Stopped):
            train(config)
    run_dir = folder / "half"
    ledger(run_dir)
    newest = run_dir / "checkpoints" / checkpoints_of(run_dir)[-1]
    plays = json.loads((newest / "state.json").read_text())["others"]["rollouts"]["group_runs"]
    cut = {t["id"]: trajectory_from_json(t).turns[-1] for play in plays for t in play["interrupted"]}
    assert any(turn.finish is Finish.ABORT and turn.tokens for turn in cut.values())
    stop._number = None
    train(config)
    ledger(run_dir)
    gone_on = 0
    for row in read_records(run_dir / "rollouts"):
        turn = cut.get(row["trajectory"])
        if turn is not None and row["dropped"] is None:
            sampled = [t for t, v in enumerate(row["versions"]) if v >= 0][: len(turn.tokens)]
            for key in ("tokens", "logprobs", "versions"):
                assert [row[key][t] for t in sampled] == pytest.approx(list(getattr(turn, key)))
            gone_on += 1
    assert gone_on > 0


def test_the_engine_has_a_version_before_groups_are_begun_in_the_place_of_those_that_made_it(folder, monkeypatch):
    """Else they would be one version older than the bound allows for."""
    seen = []
    inner = Rollouts.on_trained

    def on_trained(self):
        seen.append(self._runner.engine.version)
        inner(self)

    monkeypatch.setattr(Rollouts, "on_trained", on_trained)
    train(overlapping(folder, "order", num_rollouts=3))
    assert seen == [1, 2, 3]
    assert all(row["staleness/max"] <= 2 for row in metrics_of(folder / "order"))
