"""The front page: its run is played as it stands, and the pictures of it and of the quickstart's page are drawn from runs."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tests.e2e.tiny_run import make_files
from whet.cli import app
from whet.observe.records import read_records

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
FILES = dict(re.findall(r"^```(?:python|toml)\n# (my_\w+\.\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE))
QUICKSTART = (ROOT / "docs/quickstart.md").read_text()
DRAWN = re.findall(r"\]\((?:docs/)?(pictures/[\w-]+\.svg)\)", README + QUICKSTART)
COMMANDS = re.findall(r"^whet (\w+ my_run\.toml) ", README, re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The files of the page, beside what a quickstart leaves."""
    quickstart = tmp_path / "runs/quickstart-seed0"
    make_files(quickstart)
    (quickstart / "warmup").mkdir()
    (quickstart / "data").mkdir()
    (quickstart / "model").rename(quickstart / "warmup/model")
    (quickstart / "train.jsonl").rename(quickstart / "data/train.jsonl")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    forget_modules()
    yield tmp_path
    forget_modules()


def forget_modules() -> None:
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def test_the_commands_of_the_page_run(folder):
    assert set(FILES) == {"my_rewards.py", "my_tools.py", "my_run.toml"}
    assert COMMANDS == ["check my_run.toml", "train my_run.toml"]
    shorter = ["run_dir=run", "num_rollouts=1", "model.device=cpu"]
    for command in COMMANDS:
        result = CliRunner().invoke(app, [*command.split(), *shorter])
        assert result.exit_code == 0, result.output
    rows = read_records(folder / "run/rollouts")
    assert len(rows) == 64
    assert all(set(row["reward_components"]) == {"right", "brief"} for row in rows)


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_has_a_background_and_asks_for_nothing(name):
    """Dark or light, the page behind does not show through, and no font or script is fetched."""
    text = (ROOT / "docs" / name).read_text()
    root = ElementTree.fromstring(text)
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    first = next(element for element in root.iter() if element.tag.endswith("rect") and element.get("rx"))
    assert first.get("fill", "none") != "none"
    assert float(first.attrib["width"]) > 0.95 * width and float(first.attrib["height"]) > 0.95 * height
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "<script" not in text


def test_every_drawn_picture_is_looked_at():
    assert {Path(name).stem for name in DRAWN} == {"learning", "terminal", "smollm2-sums"}
