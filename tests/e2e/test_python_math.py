"""examples/python_math: its problems, its demonstrations and its commands with fewer steps."""

from __future__ import annotations

import random
import runpy
from pathlib import Path

import pytest

from tests.e2e.tiny_run import metrics_of
from whet.build.first_look import look_at
from whet.check.check import check
from whet.config import load_config
from whet.runs.commands import train
from whet.runs.supervised import train_on_data
from whet.settings.rl import RunConfig, check_together
from whet.settings.supervised import SupervisedRunConfig

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/python_math"


@pytest.fixture(scope="module")
def data():
    return runpy.run_path(str(EXAMPLE / "data.py"))


def test_answers_are_what_programs_print_and_no_problem_is_on_both_sides(data):
    assert data["printed"]("print(213*457)") == "97341" and data["printed"]("total = 5*6\nprint(total-7)") == "23"
    rng = random.Random(0)
    train_rows, held_out = ([data["draw"](rng, held_out=side) for _ in range(300)] for side in (False, True))
    assert not {each.text for each in train_rows} & {each.text for each in held_out}
    assert {each.wording for each in train_rows} == set(data["WORDINGS"])
    assert all("{" not in each.text and int(each.answer) >= 0 for each in train_rows)


def test_demonstrators_guess_err_and_copy_what_the_program_printed(data):
    rng, guesses, wrong = random.Random(0), 0, 0
    for _ in range(1000):
        problem = data["draw"](rng, held_out=False)
        asked, *said = data["demonstration"](problem, rng)
        assert asked.content == problem.text
        if len(said) == 1:
            guesses += 1
            continue
        call, result, answer = said
        assert data["printed"](call.tool_calls[0].arguments["code"]) == result.content
        assert answer.content == f"The answer is {result.content}."
        wrong += result.content != problem.answer
    assert guesses / 1000 == pytest.approx(data["GUESS_SHARE"], abs=0.05)
    assert wrong / (1000 - guesses) == pytest.approx(data["MISTAKE_SHARE"] / 2, abs=0.08), "half of the wordings"


def test_the_settings_for_a_real_model_are_read():
    config = load_config(RunConfig, EXAMPLE / "qwen3.toml", [])
    check_together(config)
    assert config.env.tools == ["python"] and "\\boxed{}" in config.data.system_prompt


@pytest.fixture
def here(tmp_path, monkeypatch, data):
    """A folder with the data and the random model, from a few demonstrations."""
    monkeypatch.chdir(tmp_path)
    data["write_all"](tmp_path / "runs/python_math", 0, 200)


def test_the_first_look_at_its_settings_finds_nothing_wrong(here):
    look_at(load_config(RunConfig, EXAMPLE / "run.toml", ["model.path=runs/python_math/base"]))


@pytest.mark.long
def test_its_commands_run(here):
    quiet = ["model.device=cpu", "observe.display=none", "checkpoint.interval=none"]
    train_on_data(load_config(SupervisedRunConfig, EXAMPLE / "sft.toml", [*quiet, "num_steps=30"]))
    found = check(EXAMPLE / "run.toml", quiet, lambda finding: None)
    assert (found.command, found.failed) == ("train", 0), [each for each in found.findings if each.status == "FAIL"]
    fewer = [*quiet, "num_rollouts=2", "evaluate.sets.held_out.limit=8", "stop_after_constant_rewards=none"]
    metrics = train(load_config(RunConfig, EXAMPLE / "run.toml", fewer))
    assert "eval/held_out/reward/total" in metrics
    assert len([row for row in metrics_of(Path("runs/python_math/rl")) if "policy/loss" in row]) == 2
