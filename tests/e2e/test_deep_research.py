"""examples/deep_research: its pages, demonstrations and reward, and its commands with fewer steps."""

import importlib.util
import random
import sys
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("bm25s")

from whet.config import load_config
from whet.data.formats.tags import parse_tags
from whet.env.research import report_note
from whet.env.search.corpus import read_corpus
from whet.env.search.searcher import Searcher
from whet.runs.commands import train
from whet.runs.supervised import train_on_data
from whet.settings.rl import RunConfig, check_together
from whet.settings.supervised import SupervisedRunConfig
from whet.types import Task

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/deep_research"


def module(name):
    """A file of the example."""
    spec = importlib.util.spec_from_file_location(f"deep_research_{name}", EXAMPLE / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


DATA, REWARD = module("data"), module("reward")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("deep_research")
    DATA.write_all(out, 0, 200, 50)
    return out / "data"


def test_companies_are_unique_and_a_search_finds_their_three_pages(written, tmp_path):
    known = DATA.companies()
    assert len({each.name for each in known}) == 400 and len(list(read_corpus(str(written / "corpus.jsonl")))) == 1200
    searcher = Searcher(str(written / "corpus.jsonl"), cache=str(tmp_path))
    for each in known[-100:]:
        found = {hit.document.id for hit in searcher.search(f"{each.name} results", 3)}
        assert found == {each.id_of(kind) for kind in DATA.KINDS}


def test_half_of_the_demonstrators_are_good_and_none_shows_a_held_out_company(written):
    shown = (written / "demonstrations.jsonl").read_text()
    assert not [each.name for each in DATA.companies()[-100:] if each.name in shown]
    rng, shares = random.Random(0), Counter()
    for _ in range(2000):
        prompt, reply = DATA.demonstration("Gerir Foods", rng)["messages"]
        assert "Gerir Foods" in prompt["content"]
        shares["good"] += "first quarter: revenue" in reply["content"]
        shares["filing"] += "<open> filing" in reply["content"]
        shares["unread"] += "<open>" not in reply["content"]
    assert shares["good"] / 2000 == pytest.approx(0.5, abs=0.05) and shares["filing"] / 2000 == pytest.approx(0.6, abs=0.05)
    assert shares["unread"] / 2000 == pytest.approx(0.1, abs=0.03)


def worked(report, *opened):
    """A trajectory of a company whose filing has 41 million, that opened pages and wrote a report."""
    company = DATA.Company("Gerir Foods", 41, 88, 77)
    row = company.task
    notes = () if report is None else (report_note(report, opened),)
    task = Task("t", row["prompt"], row["label"], row["metadata"])
    return SimpleNamespace(task=task, turns=(SimpleNamespace(notes=notes),))


FILING, FORUM = "filing Gerir Foods", "forum Gerir Foods"


@pytest.mark.parametrize(
    ("report", "opened", "total", "unread"),
    [
        (f"Gerir Foods, first quarter: revenue 41 million [{FILING}]", [FILING], 1.5, 0),
        (f"Gerir Foods, first quarter: revenue Forty-one million [{FILING}]", [FILING], 1.5, 0),
        (f"In Q1 2025 it had a revenue of 41 million [{FILING}]; 88 million are a rumour [{FORUM}].", [FILING, FORUM], 1.5, 0),
        (f"Revenue was 41 million in the first quarter [{FILING}]. The full year is not over.", [FILING], 1.5, 0),
        (f"Revenue was 41 million in the first quarter [{FILING}], and for the full year 88 million.", [FILING], 0.0, 0),
        (f"Gerir Foods, first quarter: revenue 41 million [{FILING}]", [], 1.0, 1),
        (f"Gerir Foods, full year: revenue eighty-eight million [{FORUM}]", [FORUM], -0.5, 0),
        (f"Gerir Foods, full year: revenue 41 million [{FILING}]", [FILING], 0.0, 0),
        (f"Gerir Foods, first quarter: revenue 410 million [{FILING}]", [FILING], 0.5, 0),
        (f"Gerir Foods, first quarter: revenue thirty-forty-one million [{FILING}]", [FILING], 0.5, 0),
        ("Gerir Foods, first quarter: revenue 4.41 million", [FILING], 0.0, 0),
        ("[41] first quarter", [], 0.0, 1),
        ("", [], 0.0, 0),
        (None, [], 0.0, 0),
    ],
)
def test_the_rubric_is_judged_by_rules(report, opened, total, unread):
    trajectory = worked(report, *opened)
    found = REWARD.rubric(trajectory)
    assert found.total == total and set(found.components) == {"first_quarter", "official", "full_year"}
    assert REWARD.unread(trajectory) == unread


def test_a_reply_of_a_demonstrator_is_read_as_tags():
    tools = [{"type": "function", "function": {"name": name, "parameters": {"properties": {"q": {}}}}} for name in ("search", "open")]
    text = DATA.demonstration("Gerir Foods", random.Random(1))["messages"][1]["content"]
    assert [call.name for call in parse_tags(text, tools).message.tool_calls] == ["search", "open"]


def test_the_settings_for_a_real_model_are_read(written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    (tmp_path / "runs/deep_research").mkdir(parents=True)
    (tmp_path / "runs/deep_research/data").symlink_to(written)
    check_together(load_config(RunConfig, EXAMPLE / "qwen3.toml", []))
    small, real = (tomllib.loads((EXAMPLE / f"{name}.toml").read_text())["reward"] for name in ("run", "qwen3"))
    assert small == real


@pytest.mark.long
def test_its_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    DATA.write_all(tmp_path / "runs/deep_research", 0, 200, 200)
    quiet = ["observe.display=none", "checkpoint.interval=none"]
    train_on_data(load_config(SupervisedRunConfig, EXAMPLE / "sft.toml", [*quiet, "num_steps=30"]))
    fewer = [*quiet, "num_rollouts=2", "evaluate.sets.held_out.limit=8", "stop_after_constant_rewards=none"]
    metrics = train(load_config(RunConfig, EXAMPLE / "run.toml", fewer))
    assert "eval/held_out/reward/report/first_quarter" in metrics and "eval/held_out/reward/opened_filing" in metrics
