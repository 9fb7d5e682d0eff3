"""A real run's folder, against docs/run_folder.md, and its report."""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from whet.quickstart.model import SmallModelConfig, make_model

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["A robe takes two bolts of blue fiber. How many bolts are that?", "James runs three sprints. How many sprints does he run?"]
REWARD = """
from pathlib import Path

def score(trajectory):
    question = trajectory.task.prompt[0].content
    mode, password = Path(__file__).with_name("judge.txt").read_text().split()
    if mode == "broken" or question.startswith("James"):
        raise ValueError(f"cannot read {question} with {password}")
    return 0.5
"""

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    shape = SmallModelConfig(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48)
    make_model(folder / "model", QUESTIONS * 2, shape, 0)
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": q, "label": "2"}) + "\n" for q in QUESTIONS))
    (folder / "my_judge.py").write_text(REWARD)
    (folder / "run.toml").write_text(
        'num_rollouts = 1\nmodel = { path = "model" }\ndata = { train = "rows.jsonl" }\n'
        "batch = { prompts_per_rollout = 2, samples_per_prompt = 2 }\nrollout = { max_turn_tokens = 8, max_tokens = 96 }\n"
        'reward = { name = "my_judge:score", timeout_s = 60 }\nevaluate = { sets = { test = { path = "rows.jsonl" } } }\n'
        'observe = { trackers = ["tensorboard"] }\n'
    )
    return folder


def whet(folder: Path, mode: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "judge.txt").write_text(f"{mode} open-sesame-5")
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "whet", *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=240, check=False
    )


def members(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_every_file_of_a_run_is_on_the_page_and_its_report_has_no_data(folder):
    done = whet(folder, "well", "train", "run.toml", "run_dir=runs/well")
    assert done.returncode == 0, done.stderr
    page = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/run_folder.md").read_text().split("##")[0], re.MULTILINE)
    known = [re.sub(r"<\w+>", r"[^/]+", re.escape(name)) + ("" if name.endswith("/") else "$") for name in page]
    files = sorted(path.relative_to(folder / "runs/well").as_posix() for path in (folder / "runs/well").rglob("*") if path.is_file())
    assert not [name for name in files if not any(re.match(pattern, name) for pattern in known)]
    assert {"config.toml", "starts.jsonl", "log.txt", "failures.jsonl", "end.json", "metrics.jsonl", ".lock"} <= set(files)
    assert json.loads((folder / "runs/well/end.json").read_text())["status"] == "finished"
    reported = whet(folder, "well", "report", "runs/well")
    assert reported.returncode == 0 and "well-report.zip" in reported.stdout, reported.stderr
    found = members(folder / "well-report.zip")
    assert "checkpoints/rollout_000001/manifest.json" in found and "step 1/1" in found["log.txt"]
    [failure] = [json.loads(line) for line in found["failures.jsonl"].splitlines()]
    assert (failure["kind"], failure["where"]) == ("RewardError", "reward")
    assert failure["frames"][:2] == ["  outside whet: 1", "ValueError"]
    assert "first RewardError in reward: see failures.jsonl" in found["log.txt"]
    for name, text in found.items():
        for word in (str(folder), "open-sesame-5", *(question[:20] for question in QUESTIONS)):
            assert word not in text, name


def test_a_failed_runs_report_says_where_and_not_what(folder):
    done = whet(folder, "broken", "train", "run.toml", "run_dir=runs/broken", "evaluate.before_training=false")
    assert done.returncode == 2 and QUESTIONS[0][:20] in done.stderr, done.stderr
    assert QUESTIONS[0][:20] not in (folder / "runs/broken/log.txt").read_text()
    reported = whet(folder, "broken", "report", "runs/broken")
    assert reported.returncode == 0, reported.stderr
    found = members(folder / "broken-report.zip")
    [failure] = [json.loads(line) for line in found["failures.jsonl"].splitlines()]
    assert (failure["kind"], failure["where"]) == ("RewardError", "reward")
    assert failure["frames"][:2] == ["  outside whet: 1", "ValueError"]
    end = json.loads(found["end.json"])
    assert (end["status"], end["kind"], end["user_code"]) == ("failed", "RolloutFailed", False)
    assert end["message"].startswith("rollout <number>: all <number> trajectories failed\n")
    assert end["resume_command"] == "whet train <text of 8 characters> run_dir=<text of 11 characters> evaluate.before_training=false"
    for name, text in found.items():
        for word in (str(folder), "open-sesame-5", *(question[:20] for question in QUESTIONS)):
            assert word not in text, name
