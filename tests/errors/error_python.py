"""Mistakes in calls of `import whet`, and what the call says."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

import whet
from tests.errors.error_bench import ROWS, Bench, Case, Told, check_kept, snapshot

SETTINGS: dict[str, Any] = {"num_rollouts": 1, "rollout__max_turn_tokens": 4, "observe__display": "none", "run_dir": "runs/new"}


def called(*lines: str) -> Callable[[Bench], Told]:
    """Calls, each in the folder of the earlier run, of which nothing may be lost. Each is shown with the error that it ends with."""

    def provoke(bench: Bench) -> Told:
        bench.files = snapshot(bench.earlier())
        names = {"whet": whet, "rows": list(ROWS), "f": lambda trajectory: 1.0, "settings": SETTINGS}
        told = [f">>> {line}\n{_error_of(bench, line, names)}" for line in lines]
        return Told(2, "\n".join(told), lambda: check_kept(bench.earlier(), bench.files))

    return provoke


def _error_of(bench: Bench, line: str, names: dict[str, Any]) -> str:
    """The error of a call, as Python shows its last lines."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(f"{bench.folder}/"):
            del sys.modules[name]
    quiet = io.StringIO()
    with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet), pytest.raises((ValueError, AttributeError, RuntimeError)) as end:
        exec(line, dict(names))
    kind = type(end.value)
    return bench.plain(f"{kind.__module__}.{kind.__qualname__}: {end.value}".removeprefix("builtins."))


PYTHON = (
    Case(
        id="python-names",
        title="A keyword that there is not",
        cause="A keyword is misspelt, or has the name that TRL, verl or slime give it.",
        remedy="Write the key that the message has. `a__b=` is the key `b` of the table `a`.",
        words=("in whet it is num_rollouts", "in whet it is batch.samples_per_prompt", "in whet it is train.optim.lr"),
        provoke=called(
            'whet.train("model", rows, f, num_rollout=3)',
            'whet.train("model", rows, f, num_generations=8, learning_rate=1e-5)',
            'whet.train("model", rows, f, train__optim__learning_rate=1e-5)',
        ),
    ),
    Case(
        id="python-no-such-call",
        title="A call that there is not",
        cause="An algorithm is no call of its own.",
        remedy='`whet.train(..., algo="grpo")`; `whet train --keys algo` lists the algorithms.',
        words=("it has Policy, Run",),
        provoke=called('whet.grpo("model", rows, f)'),
    ),
    Case(
        id="python-left-out",
        title="No data, or no reward",
        cause="`data` or `reward` is left out, or None.",
        remedy="Give both: rows, and a function of a trajectory or the name of a reward.",
        words=("data: is required", "reward: is required"),
        provoke=called('whet.train("model", reward=f)', 'whet.train("model", rows)'),
    ),
    Case(
        id="python-model-object",
        title="A model object in place of its folder",
        cause="The model is loaded by whet, for training and for sampling, and not taken over from Python.",
        remedy="Give its folder or its name on the hub; `save_pretrained` writes an object into a folder.",
        words=("is an object of the type", "save_pretrained"),
        provoke=called("whet.train(object(), rows, f)"),
    ),
    Case(
        id="python-data",
        title="Data in another form than rows",
        cause="Rows are dictionaries. A list of texts is a list of files, and a dictionary of columns is neither.",
        remedy="Give a list of dictionaries, a data set, a data frame, or the path of a file.",
        words=("no rows", "a list of texts", "give a list of rows", "there is no column 'prompt'", "did you mean train.jsonl?"),
        provoke=called(
            'whet.train("model", [], f, **settings)',
            'whet.train("model", ["What is 2+3?", "What is 4+4?"], f, **settings)',
            'whet.train("model", {"prompt": ["What is 2+3?"], "label": ["5"]}, f, **settings)',
            'whet.train("model", [{"question": "What is 2+3?"}], f, **settings)',
            'whet.train("model", "trian.jsonl", f, **settings)',
        ),
    ),
    Case(
        id="python-reward-form",
        title="A reward with the arguments of another library",
        cause="A reward is a function of one trajectory. It was called beforehand, or takes what TRL or verl give it.",
        remedy="`def reward(trajectory): return float(trajectory.task.label in trajectory.response)`",
        words=("cannot be called as f(trajectory)", "trajectory.response is the reply", "give the function itself", "did you mean math"),
        provoke=called(
            'whet.train("model", rows, lambda prompts, completions, **kwargs: [1.0], **settings)',
            'whet.train("model", rows, lambda data_source, solution_str, ground_truth: 1.0, **settings)',
            'whet.train("model", rows, 1.0, **settings)',
            'whet.train("model", rows, "maths", **settings)',
        ),
    ),
    Case(
        id="python-reward-result",
        title="A reward that returns nothing, returns text, prints, or raises",
        cause="A reward returns a float, a dict of floats, or `Rewards`. `print` returns None.",
        remedy="Return a number. What the function prints is shown as it is.",
        words=("the reward is None", "the reward is 'good' (str)", "ZeroDivisionError"),
        provoke=called(
            'whet.train("model", rows, lambda t: print(end=""), batch=dict(prompts_per_rollout=2, samples_per_prompt=4), **settings)',
            'whet.train("model", rows, lambda t: "good", batch=dict(prompts_per_rollout=2, samples_per_prompt=4), **settings)',
            'whet.train("model", rows, lambda t: 1 / 0, batch=dict(prompts_per_rollout=2, samples_per_prompt=4), **settings)',
        ),
    ),
    Case(
        id="python-tools",
        title="A tool that is alone, or without docstring or types",
        cause="`tools` is a list. The model reads each function's docstring and types.",
        remedy="Write both into the function, and `tools=[g]`.",
        words=("give a list of them, tools=[<lambda>]", "has no docstring", "has no type annotation"),
        provoke=called(
            'whet.train("model", rows, f, tools=lambda city: city)',
            'def g(city: str): ...\nwhet.train("model", rows, f, tools=[g], **settings)',
            'def g(city):\n    "Weather of a city."\nwhet.train("model", rows, f, tools=[g], **settings)',
        ),
    ),
    Case(
        id="python-values",
        title="A value of the wrong type or out of range, from Python",
        cause="Settings have types and ranges, in Python as in a file. Text that is a number is one.",
        remedy="Give what was expected.",
        words=("expected a number", "expected at least 0.0", "expected a table", "did you mean grpo"),
        provoke=called(
            'whet.train("model", rows, f, train__optim__lr="1e-5x")',
            'whet.train("model", rows, f, train__optim__lr=-1e-5)',
            'whet.train("model", rows, f, batch=8)',
            'whet.train("model", rows, f, algo="gropo")',
        ),
    ),
    Case(
        id="python-callbacks",
        title="A callback that is a plain function",
        cause="Callbacks are objects with `on_step` or `on_evaluation`.",
        remedy="Give an object of a class with one of these methods.",
        words=("neither on_step(step, metrics) nor on_evaluation",),
        provoke=called('whet.train("model", rows, f, callbacks=[lambda step, metrics: None])'),
    ),
    Case(
        id="python-no-run",
        title="A run that there is not",
        cause="The folder is no run's: it has no config.toml.",
        remedy="Give the `run_dir` of the run; `Run.folder` is it.",
        words=("is no run's folder",),
        provoke=called('whet.Run("runs/nothing").show()'),
    ),
)


def typed_options(bench: Bench) -> Told:
    yaml = bench.file("run.yaml", "model:\n  path: model\n")
    tolds = [
        bench.refused("--lr", "1e-5"),
        bench.refused("--train.optim.lr=1e-5"),
        bench.refused("num_rollouts", "=", "3"),
        bench.refused("algo.name=gropo"),
        bench.refused("actor_rollout_ref.actor.optim.lr=1e-6"),
        bench.refused("--rollout-batch-size", "32"),
        bench.refused(config=yaml),
        bench.refused(command="sft"),
    ]
    return Told(2, "".join(told.message for told in tolds), lambda: [told.check() for told in tolds].clear())


COMMAND_LINE = (
    Case(
        id="typed-options",
        title="Options and files of other programs",
        cause="Settings are `key=value` without dashes, files are TOML, and each command has its own keys.",
        remedy="Write the key that the message has.",
        words=("in whet it is train.optim.lr", "train.optim.lr=1e-5", "write num_rollouts=VALUE", "TOML, not YAML", "not of `whet sft`"),
        provoke=typed_options,
    ),
)
