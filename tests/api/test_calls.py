"""Whole runs from Python: what they return, where they are, what a second call does, and how callbacks and Ctrl-C end one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import whet
from tests.api.small import ROWS, SMALL, score
from tests.e2e.tiny_run import metrics_of, weights_of
from tests.errors.error_bench import snapshot
from whet.api.player import Player
from whet.config import ConfigError
from whet.rollout.sampling import RolloutConfig

ROOT = Path(__file__).resolve().parents[2]


def folders():
    return sorted(path.name for path in Path("runs").iterdir())


def test_a_run_from_rows_and_a_closure_is_the_one_of_files_and_the_command_line(here):
    """The same tokens, metrics and weights: rewards on threads are the rewards of workers."""
    divisor = 7

    def closure(trajectory):
        return len(trajectory.response) % divisor / divisor

    mine = whet.train("model", ROWS, reward=closure, **SMALL)
    other = whet.train("model", "train.jsonl", reward=score, **SMALL)
    assert mine.settings["reward"]["name"] == "whet.here:closure" and other.settings["reward"]["name"] == "tests.api.small:score"
    strip = [{key.replace("closure", "score"): value for key, value in row.items()} for row in metrics_of(mine.folder)]
    assert strip == metrics_of(other.folder) and weights_of(mine.folder) == weights_of(other.folder)
    assert mine.status == "finished" and mine.model_path == mine.folder / "model" and len(mine.rows) == 2


def test_a_second_experiment_is_one_and_a_folder_that_is_named_is_that_run(here, capsys):
    first = whet.train("model", ROWS, reward=score, **SMALL)
    assert whet.train("model", ROWS, reward=score, **SMALL).folder != first.folder
    (first.folder / "end.json").unlink()  # as after a kill
    changed = [{**row, "label": "x"} for row in ROWS]
    assert whet.train("model", changed, reward=score, **SMALL).folder != first.folder, "other rows are another run"
    assert whet.train("model", ROWS, reward=score, **SMALL).folder == first.folder
    again = whet.train("model", ROWS, reward=score, **SMALL, run_dir=first.folder)
    assert again.folder == first.folder and len(again.rows) == 2
    said = capsys.readouterr().err
    assert "has done all of its 2 rollouts, so nothing is trained" in said and "have changed" not in said
    other = {**SMALL, "run_dir": first.folder}
    whet.train("model", changed, reward=score, **other)
    assert "Since then have changed: the rows; a run with them needs another run_dir. Raise num_rollouts" in capsys.readouterr().err
    assert again.folder == first.folder and "x" not in (first.folder / "data/train.jsonl").read_text(), "its rows stay"
    assert len(whet.train("model", ROWS, reward=score, **{**SMALL, "num_rollouts": 3}, run_dir=first.folder).rows) == 3


EVALUATED = {
    "num_rollouts": 3,
    "batch__samples_per_prompt": 4,
    "batch": {"prompts_per_rollout": 2},
    "train__optim__lr": 1e-3,
    "evaluate__interval": 2,
    "data__shuffle": False,
}


@pytest.mark.parametrize("key", EVALUATED)
def test_settings_that_a_call_does_not_read_are_refused(here, key):
    first = next(iter(EVALUATED[key])) if isinstance(EVALUATED[key], dict) else ""
    name = key.replace("__", ".") + (f".{first}" if first else "")
    for call, word, given in ((whet.evaluate, "evaluate", (ROWS, score)), (whet.generate, "generate", ("a",))):
        with pytest.raises(ConfigError, match=rf"^{name} has no effect in whet\.{word}, which plays the .* once"):
            call("model", *given, **{key: EVALUATED[key]})
    for alone in ({"run_dir": "x"}, {"observe__display": "none"}, {"data__train": "train.jsonl"}):
        with pytest.raises(ConfigError, match=r"has no effect in whet\.generate"):
            whet.generate("model", "a", **alone)
    assert not Path("runs").exists() and not Path("x").exists()


def test_a_call_that_fails_leaves_the_rows_of_an_earlier_run(here, capsys):
    run = whet.train("model", ROWS, reward=score, **SMALL)
    before = snapshot(run.folder)
    for model in ("nothing", "rows"):
        (here / "rows").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r"model"):
            whet.train(model, ROWS[:2], reward=score, **SMALL, run_dir=run.folder)
        assert snapshot(run.folder) == before
    assert whet.train("model", ROWS, reward=score, **SMALL, run_dir=run.folder).status == "finished"
    assert "has done all of its 2 rollouts" in capsys.readouterr().err


def test_an_unfinished_run_goes_on_unless_a_function_changed(here):
    def made(divisor):
        return lambda trajectory: len(trajectory.response) % divisor / divisor

    run = whet.train("model", ROWS, reward=made(7), **SMALL)
    (run.folder / "end.json").unlink()
    assert whet.train("model", ROWS, reward=made(5), **SMALL).folder != run.folder
    assert whet.train("model", ROWS, reward=made(7), **SMALL).folder == run.folder


class Watcher:
    """Callbacks that end the run after a step."""

    def __init__(self, last):
        self.last, self.seen, self.threads = last, [], set()

    def on_step(self, step, metrics):
        self.threads.add(threading.get_ident())
        self.seen.append((step, "reward/total" in metrics))
        return step == self.last

    def on_evaluation(self, step, values):
        self.seen.append((step, values["eval/test/tasks"]))


def test_callbacks_see_steps_and_evaluations_and_may_end_the_run_as_finished(here):
    watcher = Watcher(2)
    run = whet.train("model", ROWS, reward=score, test=ROWS[:2], callbacks=watcher, **{**SMALL, "num_rollouts": 5})
    assert watcher.seen == [(0, 2), (1, True), (2, True), (2, 2)] and watcher.threads == {threading.get_ident()}
    assert run.status == "finished" and run.model_path.is_dir() and run.best.metric == "eval/test/reward/total"


def test_a_callback_that_raises_ends_the_run_which_is_saved(here):
    class Broken:
        def on_step(self, step, metrics):
            raise KeyError("no")

    with pytest.raises(ValueError, match=r"on_step of Broken' raised KeyError: 'no' \(at .*test_calls.py"):
        whet.train("model", ROWS, reward=score, callbacks=[Broken()], run_dir="runs/broken", **SMALL)
    assert list(Path("runs/broken/checkpoints").glob("rollout_*"))
    with pytest.raises(ConfigError, match="a int has neither on_step"):
        whet.train("model", ROWS, reward=score, callbacks=3, **SMALL)


def test_callbacks_that_cannot_be_called_are_refused_before_anything_runs(here):
    class Bare:
        def on_step(self):
            return True

    cases = ((Watcher, "Watcher is a class: give an object of it"), (Bare(), r"on_step of Bare' cannot be called as f\(step, metrics\)"))
    for wrong, told in cases:
        with pytest.raises(ConfigError, match=told):
            whet.train("model", ROWS, reward=score, callbacks=[wrong], **SMALL)
    assert not Path("runs").exists()


def test_a_folder_that_holds_another_thing_is_refused_and_stays_what_it_is(here):
    kept = sorted(Path("model").iterdir())
    cases = {"model": "is the folder of a model", ".": "would have the trained model in model", "model/config.json": "is a file"}
    for folder, told in cases.items():
        with pytest.raises(ValueError, match=told):
            whet.train("model", ROWS, reward=score, run_dir=folder, **SMALL)
    assert sorted(Path("model").iterdir()) == kept and not Path("data").exists()


def test_it_works_under_a_running_event_loop_with_callbacks_on_the_callers_thread(here):
    async def cell():
        watcher = Watcher(None)
        return whet.train("model", ROWS, reward=score, callbacks=watcher, **SMALL), watcher

    run, watcher = asyncio.run(cell())
    assert run.status == "finished" and watcher.threads == {threading.get_ident()} and len(watcher.seen) == 2


def test_a_start_that_fails_leaves_nothing(here):
    for wrong in ({"model": "nothing"}, {"data": [{"question": "a"}]}, {"reward": "maths"}):
        given = {"model": "model", "data": ROWS, "reward": score, **wrong}
        with pytest.raises(ValueError):
            whet.train(**given, **SMALL)
    assert not Path("runs").exists()


def test_functions_of_this_process_are_refused_where_other_processes_run(here):
    with pytest.raises(ValueError, match=r"start processes of their own .* no lambda of this one: put the functions into a file"):
        whet.train("model", ROWS, reward=lambda t: 0.0, train__parallel={"shard": 2}, **SMALL)


def test_supervised_calls(here):
    roles = ("user", "assistant")
    said = [[{"role": role, "content": text} for role, text in zip(roles, row.values(), strict=True)] for row in ROWS]
    conversations = [{"messages": messages} for messages in said]
    small = {"num_steps": 2, "observe__display": "none"}
    run = whet.sft("model", conversations, samples_per_step=2, **small)
    assert run.status == "finished" and "sft/loss" in run.rows[-1]
    pairs = [{"prompt": row["prompt"], "chosen": "yes", "rejected": "no"} for row in ROWS]
    run = whet.dpo("model", pairs, test=pairs[:2], data__prompt_key="prompt", pairs_per_step=2, **small)
    assert any(name.startswith("eval/") for name in run.results)
    assert whet.reward_model("model", pairs, data__prompt_key="prompt", pairs_per_step=2, **small).status == "finished"


def test_a_supervised_run_that_a_callback_ends_measures_what_is_held_out_once_more(here):
    seen = []

    class Enough:
        def on_step(self, step, metrics):
            return step == 2

        def on_evaluation(self, step, values):
            seen.append(step)

    pairs = [{"prompt": row["prompt"], "chosen": "yes", "rejected": "no"} for row in ROWS]
    given = {"data__prompt_key": "prompt", "pairs_per_step": 2, "num_steps": 5, "observe__display": "none"}
    run = whet.dpo("model", pairs, test=pairs[:2], callbacks=Enough(), evaluate__before_training=True, **given)
    measured = [row["step"] for row in run.rows if "eval/dpo/accuracy" in row]
    assert measured == [0, 2] == seen and run.status == "finished" and run.rows[-1]["step"] == 2


def test_a_run_keeps_the_model_that_generates_until_it_is_closed(here, monkeypatch):
    run = whet.train("model", ROWS, reward=score, **SMALL)
    loaded = []
    monkeypatch.setattr("whet.api.replies.Player", lambda *given, **more: loaded.append(1) or Player(*given, **more))
    first = run.generate(QUESTION, temperature=0)
    assert run.generate(QUESTION, temperature=0) == first and {len(run.generate(QUESTION, max_turn_tokens=1)) for _ in range(3)} != {0}
    assert len(loaded) == 1
    run.close()
    assert run.generate(QUESTION, temperature=0) == first and len(loaded) == 2
    whet.train("model", ROWS, reward=score, run_dir=str(run.folder), **{**SMALL, "num_rollouts": 3})
    run.generate(QUESTION, temperature=0)
    assert len(loaded) == 3, "newer weights are loaded"
    run.close()


def test_a_model_with_few_positions_needs_no_setting(here):
    texts = json.loads((here / "model/config.json").read_text())["max_position_embeddings"]
    assert texts < RolloutConfig().max_tokens
    rollout = {"max_turn_tokens": 8}
    run = whet.train("model", ROWS, reward=score, **{**SMALL, "rollout": rollout})
    assert run.status == "finished" and run.generate(QUESTION)
    assert whet.generate("model", "a", rollout=rollout)[0].response
    with pytest.raises(ValueError, match=f"rollout.max_tokens is {texts + 1}, but the engine runs sequences of {texts}"):
        whet.generate("model", "a", rollout={"max_tokens": texts + 1})


def test_evaluate_and_generate(here, capsys):
    run = whet.evaluate("model", ROWS, reward=score, rollout=SMALL["rollout"], observe__display="none")
    assert run.results["eval/test/tasks"] == len(ROWS) and run.folder.parent.name.startswith("evaluate-")
    run.show(num=1)
    assert QUESTION in capsys.readouterr().out and len(run.records()) == len(ROWS)
    with pytest.raises(ValueError, match="is of an evaluation, which writes no model"):
        run.push_to_hub("me/x")
    found = whet.generate("model", ["a", "b"], samples=2, reward=lambda t: 3.0, rollout=SMALL["rollout"])
    assert len(found) == 4 and {t.rewards.total for t in found} == {3.0}
    (silent,) = whet.generate("model", "a", rollout={**SMALL["rollout"], "temperature": 0})
    assert silent.rewards is None and 0 < len(silent.turns[0].tokens) <= 8


QUESTION = ROWS[0]["prompt"]


def test_tools_of_the_caller_are_played_with_and_its_run_generates_with_them(here):
    asked = []

    def double(x: int) -> str:
        """Double a number.

        Args:
            x: a number.
        """
        asked.append(x)
        return str(2 * x)

    run = whet.train("model", ROWS, reward=score, tools=[double], **SMALL)
    assert run.settings["env"]["tools"] == ["whet.here:double"]
    assert isinstance(run.generate(QUESTION, temperature=0), str)
    with pytest.raises(ConfigError, match=r"whet.here:double was a function of another Python process: whet\.generate"):
        whet.Run(run.folder).generate(QUESTION)


SCRIPT = """
    import sys, os, signal
    import whet
    from tests.api.small import ROWS, SMALL

    class Interrupt:
        def on_step(self, step, metrics):
            if step == 1 and "interrupt" in sys.argv:
                os.kill(os.getpid(), signal.SIGINT)

    def score(trajectory):
        return len(trajectory.response) % 7 / 7

    try:
        run = whet.train("model", ROWS, reward=score, callbacks=Interrupt(), **{**SMALL, "num_rollouts": 4})
    except KeyboardInterrupt as stopped:
        print("stopped:", stopped)
    else:
        print("done:", run.folder, len(run.rows))
"""


def start(folder, *arguments):
    (folder / "mine.py").write_text(textwrap.dedent(SCRIPT))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "mine.py", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200)


@pytest.mark.long
def test_ctrl_c_saves_and_the_same_call_goes_on(here):
    stopped = start(here, "interrupt")
    assert stopped.returncode == 0, stopped.stderr
    assert f"stopped: stopped by {signal.SIGINT.name}, and saved in runs/train-" in stopped.stdout
    done = start(here)
    assert done.returncode == 0 and f"done: runs/{folders()[0]} 4" in done.stdout, done.stdout + done.stderr
    assert len(folders()) == 1
