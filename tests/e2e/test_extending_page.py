"""docs/extending.md: every example is a run, and does what the page says."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tomllib
from contextlib import aclosing
from pathlib import Path

import pytest

from tests.e2e.tiny_run import make_files, metrics_of, run_config
from whet.data.formats.hermes import parse_hermes
from whet.env.build import EnvConfig, build_env_factory
from whet.env.resources import Resources
from whet.observe.records import read_records
from whet.rollout.control import ControlConfig
from whet.rollout.filters import build_selection
from whet.runs.commands import train
from whet.settings.rl import RunConfig
from whet.types import Group, Outcome, Rewards, Task, Trajectory

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/extending.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
EXAMPLES = [name for name, text in SECTIONS.items() if "```python" in text]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # before the folders that other tests' files were looked for in
    forget_modules()  # another page's example may have left one of the same name
    yield tmp_path
    forget_modules()


def forget_modules() -> None:
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def block(section: str, language: str) -> str:
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return found


def merged(base, changes):
    both = {key: merged(base[key], value) for key, value in changes.items() if isinstance(value, dict) and isinstance(base.get(key), dict)}
    return {**base, **changes, **both}


def run_example(folder, name) -> tuple[list[dict], list[dict]]:
    """The rollouts' records and the metrics of two rollouts with an example. Every token ends a turn, so that environments are asked."""
    code = block(SECTIONS[name], "python")
    (folder / code.split()[1]).write_text(code)
    settings = tomllib.loads(block(SECTIONS[name], "toml"))
    vocabulary = json.loads((folder / "model/config.json").read_text())["vocab_size"]
    stops = {"stop_token_ids": list(range(vocabulary)), "max_turn_tokens": 3}
    base = run_config(folder, "run", num_rollouts=2, rollout=stops).model_dump(exclude_defaults=True)
    if "source" in settings.get("data", {}):
        del base["data"]
    if settings.get("reward", {}).get("name"):
        del base["reward"]
    train(RunConfig.model_validate(merged(base, settings)))
    return read_records(folder / "run/rollouts"), metrics_of(folder / "run")


def tool_answer() -> str:
    """What the page's tool says to a call that a model made."""
    env = build_env_factory(EnvConfig(name="tools", tools=["my_tools:double"]))()
    call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    return asyncio.run(env.step(parse_hermes(call))).messages[0].content


def table_tools() -> list[str]:
    """The names of the page's tools for tables, and the answer of the last one."""
    settings = tomllib.loads(block(SECTIONS["Several tools"], "toml"))
    env = build_env_factory(EnvConfig.model_validate(settings["env"]))()
    call = '<tool_call>{"name": "read_customers", "arguments": {"column": "age"}}</tool_call>'
    return [tool["function"]["name"] for tool in env.tools] + [asyncio.run(env.step(parse_hermes(call))).messages[0].content]


def shared_answers() -> list[list[str]]:
    """The sums that the page's shop tells the trajectories of two tasks."""
    make = build_env_factory(EnvConfig(name="tools", tools=["my_shop:order"]))

    async def main():
        async with aclosing(Resources()) as run:
            found = []
            for task, names in (("a", ("apple", "pear")), ("b", ("pear",))):
                group, answers = run.of_group(Task(task, "p")), []
                for name in names:
                    call = '<tool_call>{"name": "order", "arguments": {"name": "%s"}}</tool_call>'
                    step = await make(**await group.of_trajectory().open(make.needs)).step(parse_hermes(call % name))
                    answers += re.findall(r"cost (\d+)", step.messages[0].content)
                found.append(answers)
            return found

    return asyncio.run(main())


def filter_says(score: float) -> str | None:
    """What the page's filter says of a group in which every trajectory has one score."""
    task = Task("t", "p")
    trajectory = Trajectory("t/0", task, (), Outcome.COMPLETED, Rewards(score))
    (keep,), order = build_selection(ControlConfig.model_validate(tomllib.loads(block(SECTIONS["Filters and order"], "toml"))["control"]))
    assert order is not None
    return keep(Group(task, (trajectory,)))


SEEN = {
    "A reward": lambda rows, lines: all({"correct", "brief"} == set(row["reward_components"]) for row in rows),
    "A reward of siblings": lambda rows, lines: {round(3 * row["reward"]) for row in rows} == {0, 1, 2},
    "A tool": lambda rows, lines: tool_answer() == "42",
    "Several tools": lambda rows, lines: (
        table_tools() == ["calculator", "read_orders", "read_customers", "3 rows of customers.age"] and len(rows) == 12
    ),
    "An environment": lambda rows, lines: {row["order"] for row in rows} == {0, 1} and lines[0]["response/turns"] == 3,
    "A resource": lambda rows, lines: shared_answers() == [["2", "5"], ["3"]] and len(rows) == 12,
    "A trajectory": lambda rows, lines: len(rows) == 24 and all(any(row["loss_mask"]) for row in rows),
    "Filters and order": lambda rows, lines: filter_says(1.0) == "too_easy" and filter_says(0.5) is None,
    "Whole rollouts": lambda rows, lines: sum(row["dropped"] == "longest" for row in rows) == 6,
    "Samples": lambda rows, lines: all(any(row["loss_mask"]) == (not row["trajectory"].endswith("/0")) for row in rows),
    "A source": lambda rows, lines: {row["task_id"] for row in rows} == {f"sum/{i}" for i in range(4)},
    "Further metrics": lambda rows, lines: sum("mine/empty" in line for line in lines) == 2,
    "A tracker": lambda rows, lines: len(Path("run/rewards.txt").read_text().splitlines()) == 2,
    "An algorithm": lambda rows, lines: max(abs(a) for row in rows for a in row["advantages"]) == 0.5,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_does_what_it_says(folder, name):
    rows, lines = run_example(folder, name)
    assert SEEN[name](rows, lines)


def test_the_table_leads_to_every_section():
    links = re.findall(r"\]\(#([\w-]+)\)", PAGE)
    assert links == [name.lower().replace(" ", "-").replace(",", "") for name in EXAMPLES]


def test_every_key_of_the_tables_is_a_setting():
    from whet.config import describe

    known = {doc.path for doc in describe(RunConfig)}
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    keys = {key for line in rows for key in re.findall(r"`([\w.]+)`", line.split(" | ")[-1])}
    keys -= {"loss.name", "env", "rollout", "reward", "loss_mask"}
    assert len(keys) > 12
    assert {key for key in keys if not any(name == key or name.startswith((f"{key}.", f"{key}[")) for name in known)} == set()
