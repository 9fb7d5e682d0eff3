"""The examples that need packages of others play, and runs train on them with a small model (`make test-agents`)."""

from __future__ import annotations

import ast
import json
import random
import runpy
from pathlib import Path

import pytest

from tests.agents.environments import python_of
from tests.agents.places import NODE, run
from tests.agents.records import counted, rows_of
from tests.e2e.mcp_files_example import EXAMPLE, factory, module, played, solution, tasks, tools
from tests.e2e.tiny_run import metrics_of, weights_of
from whet.config import load_config
from whet.init.make import make_started
from whet.runs.commands import train
from whet.settings.rl import RunConfig
from whet.types import Message, ToolCall

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]
SERVER = ["node", str(NODE / "server-filesystem/dist/index.js")]
SMALL = ["model.path=model", "model.device=cpu", "observe.display=none", "checkpoint.interval=none", "rollout.max_tokens=1024"]
FEW = ["num_rollouts=3", "batch.prompts_per_rollout=2", "batch.samples_per_prompt=2", "evaluate.sets.held_out.limit=2"]
VARIED = ["reward.name=varied.py:score", "control.max_staleness=0"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder in which the examples' paths lead to them, with a reward that differs between siblings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    (tmp_path / "varied.py").write_text("def score(trajectory):\n    return float(trajectory.id[-1] in '02468')\n")
    return tmp_path


def trained(name):
    """The rows of three steps with the example's settings for a real model, which trained on what was sampled."""
    steps = [row for row in metrics_of(Path(f"runs/{name}/real")) if "policy/loss" in row]
    assert len(steps) == 3 and max(row["mismatch/logprob_max"] for row in steps) < 1e-3
    assert weights_of(Path(f"runs/{name}/real")) != Path("model/model.safetensors").read_bytes()
    return rows_of(Path(f"runs/{name}/real"))


def test_a_run_trains_on_a_desk_of_openai_s_agents(here):
    example = here / "examples/openai_agents"
    data = runpy.run_path(str(example / "data.py"))
    data["write_all"](here / "runs/openai_agents")
    make_started(here / "model", desk_talks(data["all_orders"]()), num_steps=150)
    command = [python_of("clients"), "./examples/openai_agents/agent.py", "./runs/openai_agents/orders.json"]
    settings = f"env.options.command={json.dumps(command)}"
    train(load_config(RunConfig, example / "real.toml", [*SMALL, *FEW, *VARIED, settings, "rollout.max_turn_tokens=48"]))
    rows = trained("openai_agents")
    assert {row["outcome"] for row in rows} <= {"completed", "truncated"}, [row["error"] for row in rows]
    assert counted(rows, "calls_rewritten") + counted(rows, "calls_other") > 0, "the door has handed a question over to the clerk"


def desk_talks(orders):
    """Talks of the door and of the clerk, as the program has them."""
    nodes = ast.walk(ast.parse((EXAMPLE.parent / "openai_agents/agent.py").read_text()))
    clerk, door = (node.value.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "instructions")
    rng, talks = random.Random(0), []
    for number, order in rng.sample(sorted(orders.items()), 40):
        asked, over = Message("user", f"To which city does order {number} go?"), ToolCall("transfer_to_clerk", {})
        talks.append((Message("system", f"{door}\nTools: transfer_to_clerk()"), asked, Message("assistant", "", (over,))))
        handed = asked, Message("assistant", "", (over,)), Message("tool", '{"assistant": "Clerk"}', name="transfer_to_clerk")
        looks = ToolCall("look_up", {"number": int(number)})
        looked_up = Message("assistant", "", (looks,)), Message("tool", json.dumps(order), name="look_up")
        talks.append((Message("system", f"{clerk}\nTools: look_up(number)"), *handed, *looked_up, Message("assistant", order["city"])))
    return talks * 10


def asked_by(message):
    return Message(**message)


@pytest.mark.parametrize("job", ["find", "write", "change"])
def test_the_mcp_server_filesystem_does_the_jobs_of_its_example(job):
    task = tasks()[job]
    calls, answer = solution(task)
    trajectory, heard = run(played(factory(SERVER), task, [("", calls), (answer, ())]))
    assert module("reward").done(trajectory) == 1.0, heard
    outside, _ = run(played(factory(SERVER), task, [("", [("write_file", {"path": "/tmp/x", "content": "x"})]), (answer, ())]))
    assert not outside.turns[0].notes, "nothing is written outside of the folder"


def test_a_run_trains_in_folders_of_the_mcp_server_filesystem(here):
    data, rng = module("data"), random.Random(0)
    data.write_all(here / "runs/mcp_files")
    listed = Message("tool", "[FILE] blue.txt\n[FILE] red.txt", name="list_directory")
    said = Message("assistant", "", (ToolCall("list_directory", {"path": "teams"}),)), listed, Message("assistant", "It is room 214.")
    talks = [(*map(asked_by, data.make_row(rng, data.NAMES)["prompt"]), *said) for _ in range(200)]
    make_started(here / "model", talks, factory(SERVER)().tools, num_steps=80)
    settings = [*SMALL, *FEW, *VARIED, f"env.tools={tools(SERVER)}", "rollout.max_turn_tokens=48", "rollout.max_turns=3"]
    train(load_config(RunConfig, EXAMPLE / "real.toml", settings))
    assert counted(trained("mcp_files"), "tool_calls") > 0
