"""The commands, as a user types them, on a small model and a few real GSM8K rows."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.typed import whet, whet_here
from whet.observe.records import read_records
from whet.quickstart.model import SmallModelConfig, make_model

pytestmark = pytest.mark.long

# The first rows of GSM8K's test and training set (Cobbe et al. 2021, MIT license), answers shortened to their labels.
ROWS = [
    ("Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. How much did she earn?", "10.\n#### 10"),
    ("Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia sell "
     "altogether in April and May?", "48+24 = 72\n#### 72"),
    ("A robe takes 2 bolts of blue fiber and half that much white fiber.  How many bolts in total does it take?", "2+1=3\n#### 3"),
    ("James decides to run 3 sprints 3 times a week.  He runs 60 meters each sprint.  How many total meters does he run a week?",
     "9*60=540\n#### 540"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    shape = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
    make_model(folder / "model", [question for question, _ in ROWS] * 2, shape, 0)
    lines = [json.dumps({"question": q, "answer": a}) for q, a in ROWS]
    (folder / "gsm8k.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def gsm8k(folder: Path, run: str, *more: str) -> list[str]:
    return [
        "examples/gsm8k_grpo.toml",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'gsm8k.jsonl'}",
        f"evaluate.sets.gsm8k.path={folder / 'gsm8k.jsonl'}",
        f"run_dir={folder / run}",
        "rollout.max_turn_tokens=12",
        *more,
    ]


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_gsm8k_trains_and_evaluates(folder):
    done = whet("train", *gsm8k(folder, "gsm8k"))
    assert done.returncode == 0, done.stderr
    rows = metrics(folder / "gsm8k")
    assert [row["run/optimizer_step"] for row in rows if "policy/loss" in row] == [1, 2, 3]
    evaluation = rows[-1]
    assert evaluation["eval/gsm8k/tasks"] == 4
    assert 0 <= evaluation["eval/gsm8k/mean@1"] <= 1
    record = read_records(folder / "gsm8k/rollouts")[0]
    assert record["label"] in {"10", "72", "3", "540"}
    assert len(record["tokens"]) == len(record["logprobs"]) == len(record["versions"]) == len(record["train_logprobs"])


def test_a_second_start_resumes_and_equals_one_long_run(folder):
    """Weights after 2 rollouts, a new process, and 2 more equal those of 4 rollouts in one go, bit for bit."""
    from safetensors.torch import load_file

    steady = ("deterministic=true", "train.optim.lr=1e-3", "algo.entropy_coef=0.01", "observe.records.every=0")
    whole = whet_here("train", *gsm8k(folder, "whole", *steady, "num_rollouts=4"))
    assert whole.returncode == 0, whole.stderr
    assert whet_here("train", *gsm8k(folder, "parts", *steady, "num_rollouts=2")).returncode == 0
    second = whet("train", *gsm8k(folder, "parts", *steady, "num_rollouts=4"))
    assert second.returncode == 0, second.stderr
    assert "resumed from" in second.stdout and "num_rollouts = 4 (was 2)" in second.stderr
    steps = [(row["step"], "policy/loss" in row) for row in metrics(folder / "parts")]
    assert steps == [(1, True), (2, True), (2, False), (3, True), (4, True), (4, False)], "no row is lost or doubled, evaluations too"
    one, two = (load_file(folder / name / "model/model.safetensors") for name in ("whole", "parts"))
    start = load_file(folder / "model/model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], start[name]) for name in one), "the entropy bonus alone moves the weights"


def test_evaluate_alone_writes_what_it_played(folder):
    several = ("evaluate.sets.gsm8k.samples_per_prompt=4", "evaluate.sets.gsm8k.rollout.temperature=1.0")
    done = whet_here("evaluate", *gsm8k(folder, "evaluation", *several))
    assert done.returncode == 0, done.stderr
    assert "mean@4" in done.stdout and "pass@4" in done.stdout
    assert len(read_records(folder / "evaluation/evaluate_1/evaluations/gsm8k/rollouts")) == 16
    assert "eval/gsm8k/pass@4" in json.loads((folder / "evaluation/evaluate_1/results.json").read_text())


def test_an_evaluation_may_have_its_replies_keep_to_a_form(folder):
    form = "evaluate.sets.gsm8k.rollout.regex="
    done = whet_here("evaluate", *gsm8k(folder, "formed", form + "#### [0-9]{1,3}", "evaluate.sets.gsm8k.rollout.temperature=1.0"))
    assert done.returncode == 0, done.stderr
    played = read_records(folder / "formed/evaluate_1/evaluations/gsm8k/rollouts")
    replies = [record["turns"][0]["content"] for record in played]
    assert len(replies) == 4 and all(re.fullmatch("#### [0-9]{1,3}", reply) for reply in replies), replies
    wrong = whet_here("evaluate", *gsm8k(folder, "unformed", form + "(a"))
    assert wrong.returncode != 0 and "rollout.regex: " in wrong.stderr and "unclosed group" in wrong.stderr
    trained = whet_here("train", *gsm8k(folder, "trained", "rollout.regex=a"))
    assert trained.returncode != 0 and "rollout.regex=a cannot be trained on" in trained.stderr


def test_generate_writes_rollouts(folder):
    done = whet_here("generate", *gsm8k(folder, "unused"), "--output", str(folder / "rollouts"), "--prompts", "3")
    assert done.returncode == 0, done.stderr
    rows = read_records(folder / "rollouts/rollouts")
    assert len(rows) == 12
    assert all(row["reward"] is not None for row in rows)
    again = whet_here("generate", *gsm8k(folder, "unused"), "--output", str(folder / "rollouts"), "--prompts", "1")
    assert again.returncode == 2 and "holds records already; remove it, or choose another folder with --output" in again.stderr
    assert read_records(folder / "rollouts/rollouts") == rows


def test_sft_learns_its_conversations(folder):
    conversations = folder / "conversations.jsonl"
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in ROWS]
    conversations.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    config = folder / "sft.toml"
    config.write_text(
        f'run_dir = "{folder / "sft"}"\nnum_steps = 30\nsamples_per_step = 4\n'
        f'[model]\npath = "{folder / "model"}"\n[data]\npath = "{conversations}"\n[train.optim]\nlr = 1e-2\n'
        f'[evaluate]\npath = "{conversations}@[:3]"\ninterval = 20\n'
    )
    checked = whet_here("check", str(config))
    assert checked.returncode == 0 and "held out: 3 conversations" in checked.stdout, checked.stdout
    done = whet_here("sft", str(config))
    assert done.returncode == 0, done.stderr
    rows = metrics(folder / "sft")
    losses = [row["sft/loss"] for row in rows if "sft/loss" in row]
    assert losses[-1] < 0.5 * losses[0]
    held_out = {row["step"]: row["eval/sft/loss"] for row in rows if "eval/sft/loss" in row}
    assert list(held_out) == [0, 20, 30] and held_out[30] < 0.5 * held_out[0]
    assert (folder / "sft/model/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["algo.clip_hihg=0.3"], ["clip_hihg", "clip_high"]),
        (["batch.samples_per_step=5"], ["prompts_per_rollout (4) x samples_per_prompt (4)", "samples_per_step (5)"]),
        (["data.train=nowhere.jsonl"], ["nowhere.jsonl"]),
        (["model.path=no-such-folder"], ["no-such-folder"]),
        (["rollout.max_tokens=100000"], ["rollout.max_tokens", "2048"]),
        (["batch.samples_per_prompt=1"], ["samples_per_prompt must be at least 2"]),
        (["reward.name=tests/e2e/bad_reward.py:score"], ["all 16 trajectories failed", "KeyError", "no_such_key"]),
    ],
)
def test_mistakes_are_told_in_words(folder, arguments, words):
    check_told(whet_here("train", *gsm8k(folder, "mistakes"), *arguments), arguments, words)


def test_a_process_ends_with_the_status_and_the_words_of_a_mistake(folder):
    arguments = ["algo.clip_hihg=0.3"]
    done = whet("train", *gsm8k(folder, "mistakes"), *arguments)
    check_told(done, arguments, ["clip_hihg", "clip_high"])
    assert done.stderr.startswith("error: ") and not done.stdout


def check_told(done, arguments: list[str], words: list[str]) -> None:
    assert done.returncode == 2
    assert 'File "' not in done.stderr.replace("bad_reward.py", "") or "bad_reward" in arguments[0]
    for word in words:
        assert word in done.stderr


def test_help_and_keys_explain_every_setting():
    assert "--keys" in whet_here("train", "--help").stdout
    keys = whet_here("train", "--keys").stdout
    for key in ("algo.clip_high", "engine.embedded.cache_tokens", "batch.samples_per_prompt"):
        assert key in keys.replace("\n", "")


def test_version_names_what_it_stands_on():
    out = whet_here("version").stdout
    assert "whet 0." in out and f"torch {torch.__version__.split('+')[0]}" in out
