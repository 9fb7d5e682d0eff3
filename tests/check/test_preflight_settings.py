"""Batches, algorithm, length, packages."""

import re

import pytest

import whet.check.settings as settings
from tests.check.small_run import RL, look, module, of, write_rows


def only(status, findings, area):
    assert [finding.status for finding in findings if finding.area == area] == [status], findings
    return of(findings, area)[0]


def test_the_equation_is_shown_solved(here):
    findings, context = look("batch", overrides=["batch.samples_per_step=4", "batch.epochs=3"])
    assert only("ok", findings, "batch") == "4 prompts x 2 samples = 4 samples x 2 steps, 3 epochs: 6 optimizer steps a rollout"
    assert context.batch.optimizer_steps == 6
    findings, _ = look("batch", overrides=["batch.samples_per_step=3"])
    assert "3" in only("FAIL", findings, "batch") and "samples_per_step (3)" in of(findings, "batch")[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("batch.samples_per_prompt=1", "samples_per_prompt must be at least 2"),
        ("algo.name=gone.py:make", r"algorithm 'gone.py:make': there is no file /.*gone.py"),
        ("algo.name=algos.py:breaks", r"KeyError: 'gone' \(.*algos.py:6\)"),
        ("algo.name=algos.py:asks", "asks needs values, so it must say how a critic learns them"),
    ],
)
def test_an_algorithm_that_cannot_be_made_fails(here, override, words):
    module(
        here, "algos.py", """
        from whet.algo.config import GRPOConfig
        from whet.algo.grpo import grpo

        def breaks(options, plan):
            raise KeyError("gone")
        def asks(options, plan):
            made = grpo(GRPOConfig(), plan)
            made.needs = frozenset({"values"})
            return made
        """,
    )  # fmt: skip
    findings, context = look("batch", "algorithm", overrides=[override])
    text = only("FAIL", findings, "algorithm").replace("algos.py:asks", "asks")
    assert re.search(words, text), text
    assert context.algorithm is None


def test_greedy_trajectories_are_told_of(here):
    findings, context = look("batch", "algorithm", overrides=["algo.name=remax", "batch.samples_per_prompt=1"])
    assert of(findings, "algorithm", "ok") == [
        "remax, needs baseline",
        "4 prompts x (1 sample + 1 greedy) = 8 trajectories a rollout; the greedy ones are compared with, not trained on",
    ]
    assert context.plays_greedily and context.played_per_prompt == 2
    _, context = look("batch", "algorithm")
    assert not context.plays_greedily and context.played_per_prompt == 2


@pytest.mark.parametrize("override", ["rollout.temperature=0", "rollout.min_p=0.1"])
def test_what_cannot_be_trained_on_fails_beside_a_sound_algorithm(here, override):
    findings, _ = look("batch", "algorithm", overrides=[override])
    assert [finding.status for finding in findings if finding.area == "algorithm"] == ["FAIL", "ok"]
    assert override.partition("=")[0] in of(findings, "algorithm", "FAIL")[0]


def test_the_length_is_that_of_the_run(here):
    areas = ("batch", "model", "tokenizer", "environment", "data", "length")
    findings, context = look(*areas)
    assert only("ok", findings, "length") == "3 rollouts of 4 prompts, 1.00 passes over 12; 3 optimizer steps"
    (here / "run.toml").write_text(RL.replace("num_rollouts = 3", "num_epochs = 2.5"))
    findings, context = look(*areas, overrides=["batch.samples_per_step=2"])
    assert context.total == 7 and "28 optimizer steps" in only("ok", findings, "length")
    findings, _ = look(*areas, overrides=["num_rollouts=3"])
    assert "exactly one of num_rollouts (here 3) and num_epochs (here 2.5)" in only("FAIL", findings, "length")


def test_a_rollout_of_more_prompts_than_there_are_and_a_warm_up_without_end_are_told(here):
    areas = ("batch", "model", "tokenizer", "environment", "data", "length")
    warned = {}
    for override in ("batch.prompts_per_rollout=13", "train.optim.warmup_steps=3", "train.optim.warmup_steps=2"):
        warned[override] = of(look(*areas, overrides=[override])[0], "length", "warn")
    assert "13 prompts are taken at a time, but there are 12" in warned["batch.prompts_per_rollout=13"][0]
    assert "never reaches its peak" in warned["train.optim.warmup_steps=3"][0]
    assert warned["train.optim.warmup_steps=2"] == []


def test_supervised_runs_have_a_length_too(here):
    findings, context = look("batch", "model", "tokenizer", "data", "length", file="sft.toml")
    assert only("ok", findings, "length") == "4 steps of 3 conversations, 1.00 passes over 12; 4 optimizer steps"
    assert only("ok", findings, "batch") == "3 conversations a step" and context.total == 4


def test_packages_and_trackers_that_are_asked_for(here, monkeypatch):
    assert "no further package" in only("ok", look("packages")[0], "packages")
    monkeypatch.setattr(settings, "find_spec", lambda name: None if name == "wandb" else object())
    module(here, "trackers.py", "def good(run_dir, config): ...\nbad = 3\n")
    trackers = "observe.trackers=['tensorboard','wandb','trackers.py:good','trackers.py:bad']"
    findings, _ = look("packages", overrides=[trackers])
    assert of(findings, "packages", "ok") == ["tensorboard is there", "tracker trackers.py:good can be called"]
    fails = of(findings, "packages", "FAIL")
    assert "pip install 'whet[wandb]'" in fails[0] and "'trackers.py:bad' is a int, not a callable" in fails[1]
    findings, _ = look("packages", overrides=["observe.trackers=['trackers.py:gone']"])
    assert "has no 'gone'" in only("FAIL", findings, "packages")


def test_more_threads_than_cores_are_told(here, monkeypatch):
    monkeypatch.setattr(settings, "usable_cores", lambda: 2)
    assert of(look("packages", overrides=["threads=2"])[0], "packages", "warn") == []
    assert "threads is 3, but this process may use 2 cores" in of(look("packages", overrides=["threads=3"])[0], "packages", "warn")[0]


def test_rows_that_are_dropped_shorten_the_run(here):
    rows = [{"prompt": "short", "label": "1"}, {"prompt": "long " * 90, "label": "1"}] * 4
    write_rows(here / "train.jsonl", rows)
    areas = ("batch", "model", "tokenizer", "environment", "data", "length")
    findings, _ = look(*areas, overrides=["data.max_prompt_tokens=80"])
    assert "passes over 4;" in only("ok", findings, "length")
