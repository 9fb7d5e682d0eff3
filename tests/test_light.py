"""Settings, and what the command line says of them, are read without the heavy libraries, some of which take seconds to load."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "ray", "pyarrow", "numpy", "sympy")
LIGHT = [
    "whet",
    "whet.cli",
    "whet.settings.rl",
    "whet.settings.supervised",
    "whet.serve.settings",
    "whet.evaluate.config",
    "whet.build.run_dirs",
]
GOOD = '[model]\npath = "model"\n[data]\ntrain = "rows.jsonl"\n[reward]\nname = "math"\n[batch]\nprompts_per_rollout = 2\n'


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module):
    script = f"import sys, {module}; print(*sorted({set(HEAVY)} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of settings, and in `broken` packages of the heavy libraries' names that cannot be imported."""
    made = tmp_path_factory.mktemp("light")
    for name in HEAVY:
        package = made / "broken" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise ImportError('{name} is broken here')\n")
    (made / "good.toml").write_text(GOOD)
    (made / "typo.toml").write_text("num_rolouts = 3\n" + GOOD)
    (made / "torn.toml").write_text(GOOD + "[model\n")
    return made


def whet(folder, *arguments):
    path = os.pathsep.join([str(folder / "broken"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    command = [sys.executable, "-m", "whet", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=env)


TOLD = [
    *((f"{command} typo.toml", "num_rolouts: unknown key") for command in ("train", "sft", "dpo", "rm", "evaluate", "generate")),
    ("train missing.toml", "missing.toml"),
    ("train torn.toml", "torn.toml"),
    ("train good.toml num_rollouts=-1", "num_rollouts"),
    ("train good.toml algo.name=grop", "algo"),
    ("sft good.toml", "`whet train`"),
    ("train good.toml rollout.temperature=0", "rollout.temperature=0 cannot be trained on"),
    ("train good.toml batch.prompts_per_rollout=3 batch.samples_per_step=2", "batch: "),
    ("train good.toml checkpoint.best=eval/other/mean@1", "checkpoint.best"),
    ("serve model prot=80", "prot"),
    ("serve model --config missing.toml", "missing.toml"),
    ("serve model port=seventy", "port"),
    ("score replies.jsonl reward=math reward.timeot_s=3", "reward.timeot_s"),
    ("check good.toml --threads 3", "there is no option --threads"),
]


@pytest.mark.parametrize(("typed", "told"), TOLD)
def test_what_is_wrong_with_settings_is_told_without_them(folder, typed, told):
    done = whet(folder, *typed.split())
    assert (done.returncode, done.stderr[:7]) == (2, "error: "), done.stderr
    assert told in done.stderr and "broken" not in done.stderr


HELP = [
    *((f"{command}--help", "Usage") for command in ("", "train ", "serve ", "check ")),
    *((f"{command} --keys", "model.path") for command in ("train", "sft", "dpo", "rm", "evaluate", "generate", "serve")),
    ("--version", "whet 0"),
]


@pytest.mark.parametrize(("typed", "told"), HELP)
def test_help_needs_none_of_them(folder, typed, told):
    done = whet(folder, *typed.split())
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


@pytest.mark.parametrize("typed", ["serve model port=0", "train good.toml run_dir=run"])
def test_what_good_settings_ask_for_needs_them(folder, typed):
    done = whet(folder, *typed.split())
    assert done.returncode == 1 and "is broken here" in done.stderr
