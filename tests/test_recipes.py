"""Each file of recipes/ is read, fits together, and its memory plan fits its devices; the page shows what `whet plan` prints."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.test_docs_scaling import BLOCK, SHAPES, dense
from whet.build.learners import algorithm_of, check_models
from whet.check.budget import workload
from whet.check.context import CheckContext
from whet.cli import app
from whet.config import load_config
from whet.model.meta import read_meta
from whet.plan.memory import plan_memory
from whet.plan.mesh_memory import MeshPlanner
from whet.settings.rl import RunConfig, check_together
from whet.train.batching import plan_batch

FOLDER = Path(__file__).resolve().parents[1] / "recipes"
PAGE = FOLDER / "README.md"
RECIPES = sorted(FOLDER.glob("*.toml"))
MODELS = {
    **SHAPES,
    "Qwen/Qwen3-1.7B": lambda: dense(2048, 28, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": lambda: dense(2560, 36, 32, 9728, tied=True),
}
COMMANDS = [found.group(1) for found in BLOCK.finditer(PAGE.read_text())]
GIB = 2**30


def test_the_page_has_every_recipe_with_its_plan():
    assert len(RECIPES) >= 4
    for path in RECIPES:
        model = load_config(RunConfig, path).model.path
        assert f"[{path.name}]({path.name})" in PAGE.read_text() and any(model in command for command in COMMANDS)
        text = path.read_text()
        assert "# Hardware: " in text and ("Not run" in text or "Expected: " in text)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_together_and_its_devices(path, tmp_path):
    config = load_config(RunConfig, path)
    check_together(config)
    algorithm = algorithm_of(config)
    check_models(config, algorithm)
    MODELS[config.model.path]().save_pretrained(tmp_path)
    model = read_meta(tmp_path, config.model)
    assert model.max_positions is not None and config.rollout.max_tokens <= min(model.max_positions, config.engine.embedded.cache_tokens)
    assert config.rollout.max_tokens <= config.train.max_tokens_per_device
    context = CheckContext(config, batch=plan_batch(config.batch), algorithm=algorithm, model=model)
    work = replace(workload(context), offloaded=config.train.offload)
    degrees = config.train.degrees
    plan = plan_memory(model, work) if degrees is None else MeshPlanner(model, config.model).plan(work, degrees)
    assert 0.2 * 80 * GIB < plan.peak_bytes < 0.9 * 80 * GIB, f"{plan.peak_bytes / GIB:.1f} GiB"


@pytest.mark.parametrize("command", [pytest.param(each, marks=pytest.mark.slow) for each in COMMANDS])
def test_the_page_shows_what_the_command_prints(command, tmp_path, monkeypatch):
    words = shlex.split(command)[1:]
    MODELS[words[1]]().save_pretrained(tmp_path)
    monkeypatch.setattr("whet.plan.plan.resolve_model_path", lambda _: tmp_path)
    printed = CliRunner().invoke(app, words).output
    if os.environ.get("WHET_WRITE_DOCS"):
        block = f"```console\n$ {command}\n{printed}```"
        PAGE.write_text(BLOCK.sub(lambda found: block if found.group(1) == command else found.group(0), PAGE.read_text()))
    shown = next(found.group(2) for found in BLOCK.finditer(PAGE.read_text()) if found.group(1) == command)
    assert printed == shown and not re.search("does not fit", printed.splitlines()[2])
