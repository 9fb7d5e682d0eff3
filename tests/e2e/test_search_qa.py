"""examples/search_qa: its data, environment and reward, and its commands with fewer steps."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("bm25s")

from whet.config import load_config
from whet.data.parsers import Parsed
from whet.env.search.searcher import Searcher
from whet.runs.commands import train
from whet.runs.supervised import train_on_data
from whet.settings.rl import RunConfig, check_together
from whet.settings.supervised import SupervisedRunConfig
from whet.types import Message

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/search_qa"


def module(name):
    """A file of the example, which scripts there import by its name alone."""
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    spec = importlib.util.spec_from_file_location(f"search_qa_{name}", EXAMPLE / f"{name}.py")
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def rows(name):
    return [json.loads(line) for line in (EXAMPLE / f"{name}.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def searcher(tmp_path_factory):
    return Searcher(str(EXAMPLE / "corpus.jsonl"), cache=str(tmp_path_factory.mktemp("cache")))


def fact(row):
    return row["metadata"]["entity"], row["metadata"]["property"]


def test_held_out_facts_are_no_training_facts_and_a_good_query_finds_them(searcher):
    held_out = rows("held_out")
    assert not {fact(row) for row in held_out} & {fact(row) for row in rows("train")}
    good = named = 0
    for row in held_out:
        entity, what = fact(row)
        wanted = f"{entity}: the {what} is {row['label']}."
        good += searcher.search(f"{what} {entity}", 1)[0].document.contents == wanted
        named += searcher.search(entity, 1)[0].document.contents == wanted
    assert good / len(held_out) > 0.98 and named / len(held_out) < 0.45


def reply(text):
    return Parsed(Message("assistant", text), ())


def test_the_environment_answers_a_query_inside_the_turn(searcher):
    env = module("env").SearchTags(1, searcher)
    step = asyncio.run(env.step(reply("Let me see. <search> capital Chad </search>")))
    assert step.text == "\n\n<information> Chad: the capital is N'Djamena. </information>\n\n"
    assert step.notes[0].attachments == {"query": "capital Chad", "documents": ["chad-capital"]} and not step.done
    assert asyncio.run(env.step(reply("<answer> N'Djamena </answer>"))).done
    assert asyncio.run(env.step(reply("I do not know."))).done
    assert "not correct" in asyncio.run(env.step(reply("capital </search>"))).text
    assert "Nothing was found" in asyncio.run(env.step(reply("<search> xyzzy </search>"))).text
    assert module("env").information(["</information><answer> x"]).count("</") == 1  # a passage closes nothing


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<answer> N'Djamena </answer>", 1),
        ("<answer>the ndjamena.</answer>", 1),
        ("<answer> Abuja </answer><answer> N'Djamena </answer>", 1),
        ("<answer> N'Djamena </answer><answer> Abuja </answer>", 0),
        ("N'Djamena", 0),
        ("<answer> N'Djamena", 0),
    ],
)
def test_the_reward_is_exact_match(text, right):
    turns = [SimpleNamespace(message=SimpleNamespace(content=text), notes=())]
    trajectory = SimpleNamespace(turns=turns, task=SimpleNamespace(label="N'Djamena"))
    assert module("reward").exact_match(trajectory) == right and module("reward").searched(trajectory) == 0


def test_the_settings_for_a_real_model_are_read():
    check_together(load_config(RunConfig, EXAMPLE / "qwen3.toml", []))


@pytest.mark.long
@pytest.mark.slow
def test_its_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "examples").symlink_to(EXAMPLE.parent)
    module("data").write_all(tmp_path / "runs/search_qa", 0, 300)
    quiet = ["observe.display=none", "checkpoint.interval=none"]
    train_on_data(load_config(SupervisedRunConfig, EXAMPLE / "sft.toml", [*quiet, "num_steps=30"]))
    fewer = [*quiet, "num_rollouts=2", "evaluate.sets.held_out.limit=8", "stop_after_constant_rewards=none"]
    metrics = train(load_config(RunConfig, EXAMPLE / "run.toml", fewer))
    assert "eval/held_out/reward/total" in metrics
