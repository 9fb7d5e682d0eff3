"""Kill -9 at any moment, start again, and nothing is different: weights, metrics and records equal an undisturbed run's, bit for bit."""

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.tiny_run import is_measurement
from whet.observe.records import read_records
from whet.quickstart.run import QuickstartConfig

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
TIMEOUT_S = 1200
SHORT = {"seed": 5, "num_demonstrations": 300, "warmup_steps": 12, "num_rollouts": 5, "num_held_out": 8, "save_every": 2}
SHORT_MOMENTS = [
    ("warmup", 3, "backward", 1),
    ("warmup", 9, "save", 3),
    ("warmup", 9, "save", 7),  # the manifest is written, and the folder has not got its name yet
    ("warmup", 12, "export", 1),
    ("evaluation_warmup", -1, "evaluation", 5),
    ("rl", -1, "rollout", 7),
    ("rl", 1, "log", 1),
    ("rl", 2, "save", 7),
    ("rl", 3, "step", 1),
    ("rl", 5, "export", 2),
]


def starts(each: list[tuple[QuickstartConfig, tuple | None]], *reward: str) -> list[int]:
    """The exit status of each start: a configuration, and a moment (run, step, place, count) or None."""
    names = ("run", "step", "place", "count")
    told = [
        (config.model_dump(mode="json"), None if moment is None else dict(zip(names, moment, strict=True))) for config, moment in each
    ]
    command = [sys.executable, "-m", "tests.e2e.killed_quickstart", json.dumps(told), *reward]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=TIMEOUT_S * len(told), check=False)
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout.splitlines()[-1])
    assert set(statuses) <= {0, -signal.SIGKILL}, done.stderr
    return statuses


def results_of(run_dir: Path) -> dict:
    """Everything of a run that its settings decide; how long it took and what memory it used apart."""
    out: dict = {}
    for name in ("warmup", "rl"):
        lines = [json.loads(line) for line in (run_dir / name / "metrics.jsonl").read_text().splitlines()]
        out[f"{name} metrics"] = [{key: value for key, value in line.items() if not is_measurement(key)} for line in lines]
        out[f"{name} weights"] = (run_dir / name / "model/model.safetensors").read_bytes()
        newest = max((run_dir / name / "checkpoints").glob("rollout_*/optimizer.safetensors"))
        out[f"{name} optimizer"] = newest.read_bytes()
    rows = read_records(run_dir / "rl/rollouts")
    aside = ("timings", "task_origin")  # the latter is a path
    out["records"] = [{key: value for key, value in row.items() if key not in aside} for row in rows]
    rows = read_records(run_dir / "rl/evaluations/held_out/rollouts")
    out["evaluation records"] = [{key: value for key, value in row.items() if key not in aside} for row in rows]
    summary = json.loads((run_dir / "summary.json").read_text())
    out["summary"] = {key: value for key, value in summary.items() if key.startswith(("accuracy", "tool_call"))}
    return out


def check_equal(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name] == expected[name], name


@pytest.mark.timeout(1200)
def test_a_run_killed_again_and_again_equals_an_undisturbed_one(tmp_path):
    undisturbed, killed = (QuickstartConfig(**SHORT, run_dir=str(tmp_path / name)) for name in ("undisturbed", "killed"))
    reward = f"{HERE / 'length_reward.py'}:score"
    first, *ends, last = starts([(undisturbed, None), *((killed, moment) for moment in SHORT_MOMENTS), (killed, None)], reward)
    assert first == last == 0 and ends == [-signal.SIGKILL] * len(SHORT_MOMENTS)
    expected = results_of(tmp_path / "undisturbed")
    check_equal(results_of(tmp_path / "killed"), expected)
    assert expected["rl weights"] != expected["warmup weights"], "the reinforcement learning moved the weights"


def random_moments(config: QuickstartConfig, num: int, seed: int) -> list[tuple]:
    """Moments in the order in which a run comes by them, over all of its phases and places."""
    draw = random.Random(seed)
    moments: list[tuple] = []
    for i in range(num):
        if i % 10 == 9:
            run, last, places = "evaluation_warmup", -1, {"evaluation": 40}
        elif i % 3 == 0:
            run, last, places = "warmup", config.warmup_steps, {"backward": 1, "step": 1, "log": 1, "save": 8}
        else:
            run, last, places = "rl", config.num_rollouts, {"rollout": 60, "backward": 1, "step": 1, "log": 1, "save": 8}
        place = draw.choice(list(places))
        moments.append((run, -1 if last == -1 else draw.randrange(-1, last - 1), place, draw.randint(1, places[place])))
    order = ["warmup", "evaluation_warmup", "rl"]
    return sorted(moments, key=lambda moment: (order.index(moment[0]), moment[1]))


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_the_quickstart_killed_at_twenty_random_moments_equals_an_undisturbed_one(tmp_path):
    undisturbed, killed = (QuickstartConfig(run_dir=str(tmp_path / name)) for name in ("undisturbed", "killed"))
    moments = random_moments(killed, 20, seed=0)
    first, *ends, last = starts([(undisturbed, None), *((killed, moment) for moment in moments), (killed, None)])
    assert ends.count(-signal.SIGKILL) == len(moments), list(zip(moments, ends, strict=True))
    assert first == last == 0
    check_equal(results_of(tmp_path / "killed"), results_of(tmp_path / "undisturbed"))
