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

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["A robe takes two bolts of blue fiber. How many bolts are that?", "James runs three sprints. How many sprints does he run?"]
REWARD = """
import os

def score(trajectory):
    question = trajectory.task.prompt[0].content
    if os.environ["JUDGE_MODE"] == "broken" or question.startswith("James"):
        raise ValueError(f"cannot read {question} with " + os.environ["JUDGE_PASSWORD"])
    return 0.5
"""

FRAME = [
    '  File "~/my_judge.py", line 7, in score',
    '    raise ValueError(f"cannot read {question} with " + os.environ["JUDGE_PASSWORD"])',
    "ValueError",
]


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
        "observe = { tensorboard = true }\n"
    )
    return folder


def whet(folder: Path, mode: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "JUDGE_MODE": mode, "JUDGE_PASSWORD": "open-sesame-5", "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "whet", *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=240, check=False
    )


def members(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def holds(lines: list[str], part: list[str]) -> bool:
    return any(lines[i : i + len(part)] == part for i in range(len(lines)))


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
    assert holds(failure["frames"], FRAME)
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
    assert holds(failure["frames"], FRAME)
    end = json.loads(found["end.json"])
    assert (end["status"], end["kind"], end["user_code"]) == ("failed", "RolloutFailed", False)
    assert end["message"].startswith("rollout 0: all 4 trajectories failed <")
    assert end["resume_command"] == "whet train run.toml run_dir=runs/broken evaluate.before_training=false"
    for name, text in found.items():
        for word in (str(folder), "open-sesame-5", *(question[:20] for question in QUESTIONS)):
            assert word not in text, name
    told = whet(folder, "broken", "report", "runs/broken", "--messages", "--output", "told.zip")
    assert told.returncode == 0, told.stderr
    found = members(folder / "told.zip")
    assert QUESTIONS[0][:20] in found["failures.jsonl"] and QUESTIONS[0][:20] in found["end.json"]
    assert "open-sesame-5" not in "".join(found.values())
