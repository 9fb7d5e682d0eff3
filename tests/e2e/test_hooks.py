"""Functions of a user's own in a real run: what they change is trained on, what they say is logged, what they break loses nothing."""

from __future__ import annotations

import pytest

from tests.e2e.tiny_run import checkpoints_of, make_files, metrics_of, run_config, weights_of
from whet.config import HookFailed
from whet.observe.records import read_records
from whet.runs.commands import train

CODE = '''
from dataclasses import replace

from whet.types import Task


def first_alone(samples, groups):
    """The first sibling of each group stays in the statistics and out of the loss; the last one is left out."""
    last = {group.trajectories[-1].id for group in groups}
    first = {group.trajectories[0].id for group in groups}
    masked = [replace(s, loss_mask=(False,) * len(s.tokens)) if s.trajectory in first else s for s in samples]
    return [s for s in masked if s.trajectory not in last]


def invents(samples, groups):
    return [replace(samples[0], logprobs=(0.0,) * len(samples[0].tokens))]


def told(rollout_id, groups, dropped, metrics):
    assert metrics["reward/total"] == sum(t.rewards.total for g in groups for t in g.trajectories) / 6
    return {"mine/longest": max(len(t.response) for g in groups for t in g.trajectories), "mine/rollout": rollout_id}


def silent(rollout_id, groups, dropped, metrics):
    """Returns nothing."""


def ranks(trajectories, by):
    """The longer, the better."""
    order = sorted(trajectories, key=lambda t: getattr(t, by))
    return [float(order.index(t)) for t in trajectories]


class Numbers:
    """Numbers to count up to, without end."""

    epoch = 0

    def __init__(self, seed, first=0):
        self.first = self.coming = first

    def __len__(self):
        return 100

    def next(self, n):
        self.coming += n
        return [self.find(f"count/{i}") for i in range(self.coming - n, self.coming)]

    def find(self, task_id):
        return Task(task_id, f"What is half of {task_id.rpartition('/')[2]}?", "0")

    def state(self):
        return {"coming": self.coming}

    def restore(self, state):
        self.coming = state["coming"]


class Shortest:
    """Plays one task more than wanted, drops the one with the longest replies, and counts how often it was asked."""

    def __init__(self):
        self.asked = 0

    async def __call__(self, ask):
        self.asked += 1
        wanted = ask.wanted
        groups = await ask.runner.play(ask.source.next(wanted.groups + 1), wanted.samples_per_prompt, ask.seed)
        longest = max(groups, key=lambda g: sum(len(t.response) for t in g.trajectories))
        return [replace(g, dropped="longest") if g is longest else g for g in groups]

    def state(self):
        return {"asked": self.asked}

    def restore(self, state):
        self.asked = state["asked"]


def stops_at_third(samples, groups):
    if any(int(group.task.id.rpartition("/")[2]) > 7 for group in groups):
        raise KeyError("enough")
    return samples


def takes_a_name(rollout_id, groups, dropped, metrics):
    return {"reward/total": 0.0}


def breaks(rollout_id, groups, dropped, metrics):
    if rollout_id == 1:
        raise KeyError("mine")
'''


@pytest.fixture
def folder(tmp_path):
    make_files(tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    return tmp_path


def test_samples_are_processed_before_they_train(folder):
    train(run_config(folder, "run", num_rollouts=1, batch={"process": f"{folder}/code.py:first_alone"}))
    rows = {row["trajectory"]: row for row in read_records(folder / "run/rollouts")}
    assert len(rows) == 6
    for name, row in rows.items():
        assert row["valid"] == (not name.endswith("/2"))
        assert any(row["loss_mask"]) == (not name.endswith("/0")), "what was sampled is in the records as it would have trained"
        assert any(row["advantages"]) == name.endswith("/1") or row["reward"] == rows[name[:-1] + "0"]["reward"]
    (line,) = metrics_of(folder / "run")
    assert line["process/left_out"] == 2
    lost = [row for name, row in rows.items() if not name.endswith("/1")]
    assert line["process/masked_tokens"] == sum(sum(o == 1 for o in row["origin"]) for row in lost)


def test_a_function_that_invents_ends_the_run_before_its_update(folder):
    with pytest.raises(HookFailed, match="changed logprobs of the sample 0 of trajectory"):
        train(run_config(folder, "run", batch={"process": f"{folder}/code.py:invents"}))
    assert not (folder / "run").exists(), "nothing was learned yet: nothing binds the next start"


def test_further_metrics_are_logged_beside_the_run_s(folder):
    train(run_config(folder, "run", num_rollouts=2, observe={"on_rollout": f"{folder}/code.py:told"}))
    train(run_config(folder, "plain", num_rollouts=2))
    mine = [line for line in metrics_of(folder / "run") if "mine/rollout" in line]
    assert [(line["step"], line["mine/rollout"]) for line in mine] == [(1, 0), (2, 1)]
    assert all(line["mine/longest"] > 0 for line in mine)
    assert [line for line in metrics_of(folder / "run") if "mine/rollout" not in line] == metrics_of(folder / "plain")


def test_one_that_says_nothing_logs_nothing(folder):
    train(run_config(folder, "run", num_rollouts=1, observe={"on_rollout": f"{folder}/code.py:silent"}))
    assert len(metrics_of(folder / "run")) == 1


def test_names_that_are_taken_are_refused(folder):
    with pytest.raises(HookFailed, match="'reward/total', which is one of the run's own metrics"):
        train(run_config(folder, "run", num_rollouts=1, observe={"on_rollout": f"{folder}/code.py:takes_a_name"}))


def test_one_that_breaks_loses_no_update(folder):
    with pytest.raises(HookFailed, match=r"observe.on_rollout = .* raised KeyError: 'mine' \(at .*code.py:\d+ in breaks\)"):
        train(run_config(folder, "run", num_rollouts=3, observe={"on_rollout": f"{folder}/code.py:breaks"}))
    assert checkpoints_of(folder / "run") == ["rollout_000002"] and len(metrics_of(folder / "run")) == 2
    train(run_config(folder, "run", num_rollouts=3))
    train(run_config(folder, "plain", num_rollouts=3))
    assert metrics_of(folder / "run") == metrics_of(folder / "plain")


def test_siblings_are_scored_together_in_training_and_in_evaluation(folder):
    group = {"name": f"{folder}/code.py:ranks", "options": {"by": "response"}}
    chosen = {"path": str(folder / "train.jsonl"), "samples_per_prompt": 2, "rollout": {"temperature": 1.0}}
    config = run_config(folder, "run", num_rollouts=1, evaluate={"sets": {"test": chosen}})
    config = config.model_validate({**config.model_dump(), "reward": {"group": group, "timeout_s": 60.0}})
    values = train(config)
    assert values["eval/test/mean@2"] == 0.5, "of two siblings one has rank 0, one rank 1"
    rewards = {}
    for row in read_records(folder / "run/rollouts"):
        rewards.setdefault(row["task_id"], []).append(row["reward"])
        assert dict(row["reward_components"]) == {"ranks": row["reward"]}
    assert [sorted(found) for found in rewards.values()] == [[0.0, 1.0, 2.0]] * 2


def test_a_greedy_trajectory_has_no_siblings_to_be_scored_with(folder):
    group = {"name": f"{folder}/code.py:ranks", "options": {"by": "response"}}
    with pytest.raises(ValueError, match=r"reward\.group is set, but algo\.name=remax compares with a greedy trajectory"):
        train(run_config(folder, "run", reward={"group": group}, algo={"name": "remax"}))


def own(folder, name, **changes):
    """A run with a source and rollouts of the user's."""
    config = run_config(folder, name, num_rollouts=3, control={"rollout": f"{folder}/code.py:Shortest"}, **changes)
    data = {"source": f"{folder}/code.py:Numbers", "source_options": {"first": 2}}
    return config.model_validate({**config.model_dump(), "data": data})


def test_a_source_and_whole_rollouts_of_one_s_own_go_on_bit_for_bit(folder):
    train(own(folder, "whole"))
    rows = read_records(folder / "whole/rollouts")
    played = sorted({row["task_id"] for row in rows})
    assert played == [f"count/{i}" for i in sorted(map(str, range(2, 11)), key=lambda i: f"count/{i}")]
    assert {row["task_id"] for row in rows if row["dropped"] == "longest"} < set(played)
    assert all(line["groups/dropped/longest"] == 1 for line in metrics_of(folder / "whole"))
    with pytest.raises(HookFailed, match="enough"):  # in the third rollout
        train(own(folder, "parts", batch={"process": f"{folder}/code.py:stops_at_third"}))
    train(own(folder, "parts"))
    assert weights_of(folder / "parts") == weights_of(folder / "whole")
    kept = [{k: v for k, v in line.items() if not k.startswith("process/")} for line in metrics_of(folder / "parts")]
    assert kept == metrics_of(folder / "whole")
