"""A rank that does not come to an exchange in time, or dies in one: the run writes down where all are, names it, and ends."""

from __future__ import annotations

import json
import signal

import pytest

from tests.cluster.cluster_run import ROOT, begin, config_of, ended, family_of, make_files, metrics_of, rank_of, wait_for_lines

pytestmark = pytest.mark.long

TRAIN = {"parallel": {"shard": 2}, "exchange_timeout_s": 6.0}
PLANT = """
import os
if os.environ.get("RANK") == "1":
    import signal, torch
    inner, calls = torch.Tensor.backward, []
    def in_backward(gradient):
        {what}
    def backward(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            self.register_hook(in_backward)
        inner(self, *args, **kwargs)
    torch.Tensor.backward = backward
"""
"""A `sitecustomize` by which rank 1 comes to something bad in its third backward pass."""
RAY = {"cluster": {"backend": "ray"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hang")
    make_files(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("where", [{}, RAY], ids=["local", "ray"])
@pytest.mark.parametrize("victim", [1, 0])
def test_a_stopped_rank_is_named_with_the_stacks_of_all_and_the_run_goes_on(folder, victim, where):
    """Wherever it stands: in an exchange, between two calls, in a rollout."""
    name = f"stopped{victim}{len(where)}"
    config = config_of(folder, name, num_rollouts=100_000, train=TRAIN, checkpoint={"interval": 2}, **where)
    run = begin(config)
    wait_for_lines(folder / name / "metrics.jsonl", 3, run)
    rank_of(family_of(run.pid), victim).send_signal(signal.SIGSTOP)
    status, _, err = ended(run)
    assert status == 2, err
    [told] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert told.startswith(f"error: rank {victim} of 2 (process ") and "did not come to an exchange within 6 s" in told
    [file] = (folder / name / "failures").iterdir()
    text = file.read_text()
    assert str(file) in told and "\nphase: " in text and "\nin flight:" in text
    assert "Thread" in text.partition(f"stacks of rank {1 - victim} (")[2].partition("stacks of ")[0]
    done = max(json.loads(line)["step"] for line in (folder / name / "metrics.jsonl").read_text().splitlines())
    status, _, err = ended(begin(config.model_copy(update={"num_rollouts": done + 2})))
    assert status == 0, err
    assert [row["step"] for row in metrics_of(folder, name)] == list(range(1, done + 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "rank 1 of 2 was killed by SIGKILL"),
        ("while True: pass", "did not come to an exchange within 6 s (train.exchange_timeout_s): it hangs, or computes for longer"),
    ],
    ids=["killed", "loop"],
)
def test_a_rank_that_dies_or_hangs_in_backward(folder, what, words):
    name = "loop" if "while" in what else "killed"
    planted = folder / f"planted-{name}"
    planted.mkdir()
    (planted / "sitecustomize.py").write_text(PLANT.format(what=what))
    config = config_of(folder, name, num_rollouts=5, train=TRAIN, checkpoint={"interval": 1})
    status, _, err = ended(begin(config, PYTHONPATH=f"{planted}:{ROOT}"))
    assert status == 2, err
    [told] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert told.startswith("error: rank 1 of 2 ") and words in told
    if name == "loop":
        text = (folder / name / "failures/1_rank_1.txt").read_text()
        hung = text.partition("stacks of rank 1 (")[2].partition("stacks of ")[0]
        assert "in in_backward" in hung and "policy.forward_backward, for " in hung and "phase: update" in text
    status, _, err = ended(begin(config))
    assert status == 0, err
    assert [row["step"] for row in metrics_of(folder, name)] == [1, 2, 3, 4, 5]
