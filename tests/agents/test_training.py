"""A run trains on each kind of program, with its real package and a small model (`make test-agents`)."""

from __future__ import annotations

import json

import pytest

from tests.agents.environments import python_of
from tests.agents.programs import AGENTS, CHAT, LOGPROBS, MESSAGES, MINI, RESPONSES, RETRIES
from tests.agents.records import counted, rows_of
from tests.e2e.tiny_run import metrics_of, over, weights_of
from whet.init.make import make_started
from whet.runs.commands import train
from whet.settings.rl import RunConfig
from whet.types import Message, ToolCall

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]
QUESTIONS = ("12*3?", "4*9?")
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
SCHEMA = {"type": "function", "function": {"name": "calculator", "description": "Computes.", "parameters": PARAMETERS}}
LOOKS = "I look.\n\n```mswea_bash_command\necho 36\n```"
SUBMITS = "Done.\n\n```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
NUM_ROLLOUTS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that has seen what the programs are about, the questions, and a reward that half of a group has."""
    folder = tmp_path_factory.mktemp("training")
    called = ToolCall("calculator", {"expression": "12*3"})
    calls = (Message("assistant", "", (called,)), Message("tool", "36", name="calculator"), Message("assistant", "The answer is 36."))
    works = (Message("assistant", LOOKS), Message("user", "36\n (0)"), Message("assistant", SUBMITS))
    shown = [(Message("user", question), *calls) for question in QUESTIONS]
    shown += [(Message("system", "You are 12."), *talk) for talk in shown]
    shown += [(Message("system", "Use bash."), Message("user", question), *works) for question in QUESTIONS]
    make_started(folder / "model", shown * 10, [SCHEMA], num_steps=120)
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": question, "label": "36"}) + "\n" for question in QUESTIONS))
    (folder / "half.py").write_text("def score(trajectory):\n    return float(trajectory.id[-1] in '02468')\n")
    return folder


def trained(folder, name, environment, program, **changes):
    """The rows of a run's records, after it was looked at: it trained, on all that was sampled and on nothing else."""
    options = {"command": [python_of(environment), "-c", program]}
    settings = {
        "run_dir": str(folder / name),
        "num_rollouts": NUM_ROLLOUTS,
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "data": {"train": str(folder / "train.jsonl")},
        "batch": {"prompts_per_rollout": 1, "samples_per_prompt": 4},
        "env": {"name": "program", "options": options},
        "reward": {"name": f"{folder / 'half.py'}:score"},
        "rollout": {"max_turns": 6, "max_turn_tokens": 64, "max_tokens": 600, "timeout_s": 120},
        "train": {"optim": {"lr": 1e-3}},
        "checkpoint": {"interval": None},
        "observe": {"display": "none"},
    }
    train(RunConfig.model_validate(over(settings, changes)))
    steps = [row for row in metrics_of(folder / name) if "policy/loss" in row]
    assert len(steps) == NUM_ROLLOUTS and max(row["mismatch/logprob_max"] for row in steps) < 1e-3, steps
    assert weights_of(folder / name) != (folder / "model/model.safetensors").read_bytes()
    rows = rows_of(folder / name)
    assert len({(row["rollout_id"], row["trajectory"]) for row in rows}) == 4 * NUM_ROLLOUTS
    assert {row["outcome"] for row in rows} <= {"completed", "truncated"}, [row["error"] for row in rows]
    for row in rows:
        for place, trains in enumerate(row["loss_mask"]):
            assert not trains or row["first_logprobs"][place] == pytest.approx(row["logprobs"][place], abs=1e-3)
    return rows


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("program", [CHAT, RESPONSES, MESSAGES], ids=["openai", "responses", "anthropic"])
def test_a_run_trains_on_a_client_with_tools(folder, request, program, stream):
    rows = trained(folder, request.node.callspec.id, "clients", program.replace("STREAM", str(stream)))
    assert counted(rows, "calls_extends") > 0, "it called its tool and went on"


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_a_run_trains_on_three_agents_of_openai_side_by_side(folder, request, responses):
    rows = trained(folder, f"agents-{request.node.callspec.id}", "clients", AGENTS.replace("STREAM", str(responses)))
    assert len(rows) >= 3 * 4 * NUM_ROLLOUTS, "each of them is a sample"


def test_a_run_trains_on_mini_swe_agent(folder):
    assert counted(trained(folder, "mini", "mini_swe", MINI), "calls_extends") > 0, "it read what its command printed"


def test_a_run_trains_on_replies_whose_log_probs_the_program_has_read(folder):
    rows = trained(folder, "logprobs", "clients", LOGPROBS)
    for row in rows:
        (note,) = row["notes"]
        told = json.loads(json.loads(note["attachments"])["stdout"])
        sampled = [row["logprobs"][place] for place, trains in enumerate(row["loss_mask"]) if trains]
        assert told == pytest.approx(sampled, abs=1e-4), "those of the records, token by token"


def test_a_run_trains_once_on_what_clients_asked_twice(folder):
    rows = trained(folder, "retries", "clients", RETRIES)
    assert counted(rows, "calls_retried") == 2 * 4 * NUM_ROLLOUTS and len(rows) == 2 * 4 * NUM_ROLLOUTS
