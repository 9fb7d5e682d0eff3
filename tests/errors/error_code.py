"""Errors of a user's own code: rewards, tools, environments, algorithms, trackers."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from tests.errors.error_bench import Bench, Case, Told, together, with_message
from whet.observe.records import read_records
from whet.types import Origin

KEYS = ("reward.name={}", "env.name={}", "algo.name={}", "env.parser={}", 'observe.trackers=["{}"]')


def all_kinds(bench: Bench, reference: str) -> Told:
    """The same reference as a reward, environment, algorithm, parser, tracker and tool."""
    told = [bench.refused(key.format(reference)) for key in KEYS]
    return together(*told, bench.refused("env.name=tools", f'env.tools=["{reference}"]'))


def not_found(bench: Bench) -> Told:
    module = all_kinds(bench, "my_cod:score")
    return together(module, bench.refused("reward.name=my_cod.py:score"), bench.refused("reward.name=my_code.py:varieti"))


def no_import(bench: Bench) -> Told:
    bench.file("needy.py", '"""Needs a package that is not installed."""\n\nimport sentence_scorer\n')
    return all_kinds(bench, "needy.py:score")


def arguments(bench: Bench) -> Told:
    return together(
        bench.refused("reward.name=my_code.py:with_two_answers"),
        bench.refused("reward.name=my_code.py:variety", "reward.options={limit=3}"),
        bench.refused("algo.name=my_code.py:variety"),
    )


def reward(bench: Bench, name: str, failed: dict[str, int], *more: str) -> Told:
    return bench.goes_on(f"reward.name=my_code.py:{name}", *more, failed=failed)


def raises_for_some(bench: Bench) -> Told:
    return reward(bench, "difficulty", {"reward_error": 4})


def raises_for_all(bench: Bench) -> Told:
    return bench.refused("reward.name=my_code.py:level", "num_rollouts=2")


def mended_level(bench: Bench) -> tuple[str, ...]:
    bench.rewrite("my_code.py", 'trajectory.task.metadata["level"]', "variety(trajectory)")
    return "reward.name=my_code.py:level", "num_rollouts=2"


def hangs(bench: Bench) -> Told:
    return reward(bench, "slow", {"timeout": 1}, "reward.timeout_s=0.5")


def not_a_number(bench: Bench) -> Told:
    return reward(bench, "not_a_number", {"reward_error": 1})


def infinite(bench: Bench) -> Told:
    return reward(bench, "infinite", {"reward_error": 1})


def text(bench: Bench) -> Told:
    return reward(bench, "text", {"reward_error": 1})


def crashes(bench: Bench) -> Told:
    return reward(bench, "crash", {"reward_error": 1})


def tool(bench: Bench, name: str, failed: dict[str, int], *more: str) -> Told:
    settings = (f'env.tools=["my_code.py:{name}"]', f"env.parser=my_code.py:asks_{name}")
    return bench.goes_on(*settings, *more, config="tools.toml", failed=failed)


def tool_raises(bench: Bench) -> Told:
    return tool(bench, "population", {"env_error": 1})


def tool_refuses(bench: Bench) -> Told:
    """Nothing is printed: the model reads it, so the answer is taken from the record of the first trajectory."""
    told = tool(bench, "mayor", {})
    assert told.message == "\n", "nothing of it is the user's to mend"
    record = next(r for r in read_records(Path("runs/demo/rollouts")) if r["trajectory"] == "train/0#0/0")
    answer = [token for token, origin in zip(record["tokens"], record["origin"], strict=True) if origin == Origin.ENVIRONMENT]
    rows = [json.loads(line) for line in Path("runs/demo/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["tools/validity"] == 15 / 16, "one of two calls in each of eight trajectories"
    return with_message(told, str(AutoTokenizer.from_pretrained("model").decode(answer)))


def tool_hangs(bench: Bench) -> Told:
    return tool(bench, "weather", {"timeout": 1}, "env.tool_timeout_s=0.2")


def time_over(bench: Bench) -> Told:
    return tool(bench, "weather", {"timeout": 1}, "env.tool_timeout_s=none", "rollout.timeout_s=3")


def tool_without_types(bench: Bench) -> Told:
    bench.file("tools.py", 'def add(a, b):\n    """Adds."""\n    return a + b\n\n\ndef silent(a: int) -> int:\n    return a\n')
    return together(*(bench.refused("env.name=tools", f'env.tools=["tools.py:{name}"]') for name in ("add", "silent")))


CODE = (
    Case(
        id="reference-not-found",
        title="Code that is not found",
        cause="A reward, environment, algorithm, parser, tracker or tool is named by an import reference, and there is no such module, "
        "file or name. Modules are looked for where Python does and in the current folder.",
        remedy="Write `module:name` or `path/to/file.py:name`, and start whet in the folder that the path starts from.",
        words=(
            "reward 'my_cod:score': no module named 'my_cod'",
            "environment 'my_cod:score'",
            "algorithm 'my_cod:score'",
            "parser 'my_cod:score'",
            "tracker 'my_cod:score'",
            "tool 'my_cod:score'",
            "there is no file .../my_cod.py",
            "my_code.py has no 'varieti'; did you mean variety?",
        ),
        provoke=not_found,
        seen_by_check=True,
    ),
    Case(
        id="reference-import-fails",
        title="Code that cannot be imported",
        cause="The module is found, but running it raises: a package is not installed, or there is a mistake in it.",
        remedy="Install the package in whet's environment, or correct the line that the message names.",
        words=(
            "reward 'needy.py:score': its module fails to import: ModuleNotFoundError: No module named 'sentence_scorer' (.../needy.py:3)",
            *(f"{kind} 'needy.py:score'" for kind in ("environment", "algorithm", "parser", "tracker", "tool")),
        ),
        provoke=no_import,
        seen_by_check=True,
    ),
    Case(
        id="reference-arguments",
        title="Code that takes other arguments",
        cause="A reward is called as `f(trajectory, **reward.options)`, an environment as `f(**env.options)`, an algorithm as "
        "`f(options, plan)`, a tracker as `f(run_dir, config)`.",
        remedy="Give the function these arguments, or the missing ones in `options`.",
        words=(
            "cannot be called as f(trajectory): missing a required argument: 'reference'",
            "f(trajectory, limit=...)",
            "f(options, plan)",
        ),
        provoke=arguments,
        seen_by_check=True,
    ),
    Case(
        id="reward-raises-for-some",
        title="A reward that raises for some trajectories",
        cause="Your function raised. The first failure of each kind is shown with its traceback. Such a trajectory has the outcome "
        "`reward_error`: it is counted in `outcome/reward_error`, kept in the records, and neither trains nor counts as a reward of 0.",
        remedy="Correct the function, or the row that the message names. The run goes on meanwhile.",
        words=(
            "trajectory train/1#0/0 failed in reward",
            "on task 'train/1#0' (train.jsonl:2): KeyError: 'difficulty'",
            "my_code.py:",
            "in difficulty",
            "Traceback (most recent call last)",
        ),
        provoke=raises_for_some,
        status=0,
        seen_by_check=False,  # only on some rows, and check tries the first
    ),
    Case(
        id="reward-raises-for-all",
        title="A reward that raises for every trajectory",
        cause="Every trajectory of a rollout failed, so there is nothing to learn from and the run stops. An algorithm that compares "
        "with greedy trajectories (`remax`) stops, too, where all of those failed; of single ones only the tasks are left out.",
        remedy="Correct the function. The same command goes on from the newest checkpoint, or begins anew where there is none yet: what failed is "
        "played again.",
        words=("rollout 1: all 8 trajectories failed", "8 in reward", "KeyError: 'level'", "Traceback (most recent call last)"),
        provoke=raises_for_all,
        seen_by_check=True,
        check_words=("(train.jsonl:1): KeyError: 'level'", "in level"),
        mend=mended_level,
    ),
    Case(
        id="reward-hangs",
        title="A reward that hangs",
        cause="Your function took longer than `reward.timeout_s` (10 s by default). Its process is killed and a new one started; the "
        "trajectory is a timeout, counted in `outcome/timeout`.",
        remedy="Give what the function waits for a limit of its own, or raise `reward.timeout_s`.",
        words=("train/0#0/0 failed in reward: RewardTimeout", "took longer than 0.5 s (reward.timeout_s); its worker was killed"),
        provoke=hangs,
        status=0,
        seen_by_check=True,
        check_words=("(train.jsonl:1) took longer than 0.5 s (reward.timeout_s)",),
    ),
    Case(
        id="reward-nan",
        title="A reward that is not a number",
        cause="Your function returned NaN, as 0/0 gives it. One NaN among the rewards of a group would make all its advantages NaN.",
        remedy="Return a finite number, or raise where there is none.",
        words=("the reward is nan; it must be finite", "train.jsonl:1"),
        provoke=not_a_number,
        status=0,
        seen_by_check=True,
    ),
    Case(
        id="reward-infinite",
        title="A reward that is infinite",
        cause="Your function returned an infinity, as a logarithm of 0 gives it.",
        remedy="Bound it.",
        words=("the reward is inf; it must be finite",),
        provoke=infinite,
        status=0,
        seen_by_check=True,
    ),
    Case(
        id="reward-text",
        title="A reward that is text",
        cause="Your function returned something that is no score.",
        remedy="Return a number, a dict of numbers by name, or `whet.types.Rewards`.",
        words=("the reward is '0.5' (str); return a float, a dict of floats, or Rewards",),
        provoke=text,
        status=0,
        seen_by_check=True,
    ),
    Case(
        id="reward-crashes",
        title="A reward whose process dies",
        cause="Your function, or a library that it calls, brought its process down. The trainer runs in another one.",
        remedy="Its last output is in the message. A process that needs more memory gets it with `reward.worker_memory_mb`.",
        words=("its worker died (signal SIGSEGV)",),
        provoke=crashes,
        status=0,
        seen_by_check=True,
    ),
    Case(
        id="tool-raises",
        title="A tool that raises",
        cause="A tool raised something other than `ValueError`. The trajectory has the outcome `env_error` and is left out and counted.",
        remedy="Correct the tool. Where the model asked for something impossible, raise `ValueError`: the model reads its text and may "
        "try again.",
        words=(
            "train/0#0/0 failed in env.step: KeyError: 'Atlantis'",
            "in population",
            'raised by the tool population, called with {"city": "Atlantis"}',
        ),
        provoke=tool_raises,
        status=0,
        seen_by_check=False,  # check calls no tool of the user's
    ),
    Case(
        id="tool-refuses",
        title="A tool that raises ValueError",
        cause="This is how a tool answers a model that called it wrongly. The model reads the text above, nothing is printed, and the "
        "call counts as invalid in `tools/validity`.",
        remedy="Nothing: the conversation goes on.",
        words=("Error: there is no city 'Atlantis'; ask for one that exists",),
        provoke=tool_refuses,
        status=0,
        seen_by_check=False,  # no fault
    ),
    Case(
        id="tool-hangs",
        title="A tool that hangs",
        cause="A call took longer than `env.tool_timeout_s` (30 s by default). The trajectory is a timeout; the other calls go on.",
        remedy="Give what the tool waits for a limit of its own, or raise `env.tool_timeout_s`. With `deterministic=true` limits in "
        "seconds are off.",
        words=("train/0#0/0 failed in env.step: TimeoutError: tool weather took longer than 0.2 s (env.tool_timeout_s)",),
        provoke=tool_hangs,
        status=0,
        seen_by_check=False,  # check calls no tool of the user's
    ),
    Case(
        id="trajectory-timeout",
        title="A trajectory that takes too long",
        cause="A trajectory has `rollout.timeout_s` (600 s by default) from its start to its reward, whatever it waits for. What the "
        "model had sampled by then is kept in the records.",
        remedy="The message says what it waited for: limit that, or raise `rollout.timeout_s`.",
        words=(
            "train/0#0/0 failed in env.step: TimeoutError",
            "the trajectory's 3.0 s (rollout.timeout_s) were over while it waited for env.step",
        ),
        provoke=time_over,
        status=0,
        seen_by_check=False,  # check calls no tool of the user's
    ),
    Case(
        id="tool-without-types",
        title="A tool that the model cannot be told about",
        cause="The model reads a tool's schema, which is made from the function's annotations and docstring.",
        remedy="Annotate every parameter and write a docstring.",
        words=("tool add: parameter a has no type annotation", "tool silent has no docstring"),
        provoke=tool_without_types,
        seen_by_check=True,
    ),
)
