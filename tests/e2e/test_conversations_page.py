"""docs/conversations.md: every example is a run."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from tests.e2e.tiny_run import make_files, metrics_of, run_config
from whet.observe.records import read_records
from whet.runs.commands import train

pytestmark = pytest.mark.long

PAGE = (Path(__file__).resolve().parents[2] / "docs/conversations.md").read_text()
CODE = re.findall(r"^```python\n(# (\w+)\.py\n.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SETTINGS = [tomllib.loads(text) for text in re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)]
USER, GAME = SETTINGS
OWN = {"env": {"name": "my_debate:Debate"}}


@pytest.mark.parametrize(("changes", "num_samples"), [(USER, 1), (GAME, 2), (OWN, 2)], ids=["user", "game", "own"])
def test_an_example_is_a_run(changes, num_samples, tmp_path, monkeypatch):
    make_files(tmp_path)
    rows = '{"prompt": "What is 12 times 3?", "label": "36", "metadata": {"wish": "12 times 3"}}\n' * 4
    (tmp_path / "train.jsonl").write_text(rows)
    for text, name in CODE:
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rollout = {"max_turn_tokens": 6, "max_tokens": 300, "max_turns": 8}
    train(run_config(tmp_path, "run", **{"num_rollouts": 2, "rollout": rollout, **changes}))
    assert all(row["outcome/failed"] == 0 for row in metrics_of(tmp_path / "run") if "outcome/failed" in row)
    for path in sorted((tmp_path / "run/rollouts").glob("*.parquet")):
        found = read_records(path)
        assert len(found) == 2 * 3 * num_samples and {row["group_size"] for row in found} <= {3}
