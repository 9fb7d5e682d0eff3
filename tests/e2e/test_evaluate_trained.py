"""`whet evaluate` measures what the run has trained, and says which weights these are; `--base` measures the start."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.tiny_run import make_files, run_config
from whet.observe.records import read_records
from whet.runs.commands import evaluate, train

pytestmark = pytest.mark.long


@pytest.fixture(scope="module", params=["whole", "adapter"])
def trained(request, tmp_path_factory):
    """A run of two rollouts, its settings, and the model folder that it should be measured as."""
    folder = tmp_path_factory.mktemp(request.param)
    make_files(folder)
    sets = {"again": {"path": str(folder / "train.jsonl"), "rollout": {"temperature": 1.0}}}
    changes = {"num_rollouts": 2, "checkpoint": {"interval": 1}, "evaluate": {"sets": sets}}
    if request.param == "adapter":
        changes["train"] = {"optim": {"lr": 5e-2}, "lora": {"rank": 4, "export_merged": True}}
    config = run_config(folder, "run", **changes)
    train(config)
    as_model = folder / "run" / ("merged" if request.param == "adapter" else "model")
    return folder, config, as_model


def measure(config, **options):
    """Evaluate once; returns the weights that were named and what was sampled, with its log-probs."""
    before = set(Path(config.run_dir).glob("evaluate_*"))
    evaluate(config, **options)
    (folder,) = set(Path(config.run_dir).glob("evaluate_*")) - before
    records = read_records(folder / "evaluations/again/rollouts")
    return json.loads((folder / "results.json").read_text())["weights"], [(row["tokens"], row["logprobs"]) for row in records]


def played_by(folder, config, model: Path, name: str):
    """What a model folder of its own plays, in a run that has trained nothing."""
    settings = config.model_dump(exclude_unset=True)
    settings["model"]["path"] = str(model)
    settings.get("train", {}).pop("lora", None)
    return measure(type(config).model_validate(settings | {"run_dir": str(folder / name)}))[1]


def near(one, other) -> bool:
    same = [a[0] == b[0] for a, b in zip(one, other, strict=True)]
    return all(same) and all(a[1] == pytest.approx(b[1], abs=1e-5) for a, b in zip(one, other, strict=True))


def test_a_finished_run_is_measured_as_it_was_trained_and_base_measures_the_start(trained):
    folder, config, as_model = trained
    weights, played = measure(config)
    assert weights == str(folder / "run/model")
    assert near(played, played_by(folder, config, as_model, "as_model"))
    named, start = measure(config, base=True)
    assert named == str(folder / "model")
    assert near(start, played_by(folder, config, folder / "model", "as_start")) and not near(start, played)


def test_a_run_that_was_stopped_is_measured_at_its_newest_checkpoint(trained, tmp_path):
    folder, config, as_model = trained
    shutil.copytree(folder / "run", tmp_path / "run")
    (tmp_path / "run/end.json").unlink()
    weights, played = measure(type(config).model_validate(config.model_dump() | {"run_dir": str(tmp_path / "run")}))
    assert weights == str(tmp_path / "run/checkpoints/rollout_000002")
    assert near(played, played_by(folder, config, as_model, "as_checkpoint"))


def test_a_run_that_has_trained_nothing_is_measured_at_its_start(trained, tmp_path):
    folder, config, _ = trained
    weights, _ = measure(type(config).model_validate(config.model_dump() | {"run_dir": str(tmp_path / "new")}))
    assert weights == str(folder / "model")


def test_weights_may_be_read_by_whom_the_umask_lets_read(trained):
    folder, _, _ = trained
    mode = (folder / "train.jsonl").stat().st_mode
    files = [*folder.glob("**/*.safetensors")]
    assert len(files) > 4 and {path.stat().st_mode for path in files} == {mode}
