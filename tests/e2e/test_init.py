"""`whet init`, then what its README says: check, train, and the tests of the folder."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.tiny_run import metrics_of
from whet.init.make import TEMPLATES, write_folder

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("math", "tools", "search", "rlhf")


def run(folder: Path, *command: str) -> str:
    """What a command prints; it is to end well."""
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_template_has_its_files_and_is_known_to_the_command_line():
    assert sorted(path.name for path in TEMPLATES.iterdir()) == sorted(KINDS)
    for kind in KINDS:
        names = {path.name for path in (TEMPLATES / kind).iterdir() if path.is_file()}
        assert {"config.toml", "reward.py", "test_reward.py", "README.md"} <= names
        assert len((TEMPLATES / kind / "README.md").read_text().splitlines()) <= 12
    assert re.search(rf"{re.escape('{' + '|'.join(KINDS) + '}')}|{re.escape('|'.join(KINDS))}", run(ROOT, "-m", "whet", "init", "--help"))


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/reward.py").write_text("mine")
    with pytest.raises(ValueError, match=r"mine has reward.py already, and nothing is overwritten: whet init math ANOTHER_FOLDER"):
        write_folder("math", tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "reward.py"]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_checked_and_trained_and_its_tests_pass(kind, tmp_path):
    run(tmp_path, "-m", "whet", "init", kind)
    folder = tmp_path / kind
    commands = re.findall(r"^whet (.*)", (folder / "README.md").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in commands][:2] == ["check", "train"], "three commands, with init"
    printed = {line.split()[0]: run(folder, "-m", "whet", *line.split()) for line in commands}
    assert "FAIL" not in printed["check"]
    rewards = [row["reward/total"] for row in metrics_of(folder / "run") if "reward/total" in row]
    assert sum(rewards[-8:]) / 8 > sum(rewards[:8]) / 8 + 0.05, rewards
    assert json.loads((folder / "run/model/config.json").read_text())["model_type"] == "qwen3"
    run(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider")
