"""What an editor knows of the keyword arguments is what the settings are."""

import ast
import subprocess
import sys
from pathlib import Path

from whet.config import describe
from whet.settings.supervised import RUN_CONFIGS

ROOT = Path(__file__).resolve().parents[2]
STUB = ROOT / "whet/api/keywords.pyi"


def test_the_file_is_of_todays_settings():
    script = "import sys; sys.path.insert(0, 'docs'); import write_keywords; sys.stdout.write(write_keywords.text())"
    written = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    assert written == STUB.read_text(), "write it again: python docs/write_keywords.py"


def test_every_setting_is_a_keyword():
    classes = {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)}
    for command, name in {"train": "TrainSettings", "sft": "SftSettings", "dpo": "DpoSettings", "rm": "RewardModelSettings"}.items():
        known = {line.target.id for line in classes[name].body if isinstance(line, ast.AnnAssign)}
        paths = [doc.path for doc in describe(RUN_CONFIGS[command]) if "<" not in doc.path and "[" not in doc.path]
        wanted = {path.replace(".", "__") for path in paths} - {"model", "data", "reward", "algo", "algo__name"}
        assert {key for key in wanted if not key.startswith("algo__")} - known == set()


def test_a_type_checker_sees_them(tmp_path):
    code = tmp_path / "mine.py"
    code.write_text(
        "import whet\n"
        "run = whet.train('m', reward='math', num_rollouts=3, train__optim__lr=1e-5, rollout={'temperature': 0.5})\n"
        "run.metrics\n"
        "whet.train('m', reward='math', num_rolouts=3)\n"
        "whet.train('m', reward='math', rollout={'temperatur': 0.5})\n"
        "whet.sft('m', 'rows.jsonl', num_steps='many')\n"
    )
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    wrong = sorted({int(line.split(":")[1]) for line in done.stdout.splitlines() if " error: " in line})
    assert wrong == [4, 5, 6], done.stdout
