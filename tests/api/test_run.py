"""What a run's folder says in Python, and the upload of its model."""

import json
from pathlib import Path
from typing import ClassVar

import pytest

import whet
from whet.api.plot import plot


@pytest.fixture
def folder(tmp_path):
    """A finished run's folder, written by hand."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    tables = {"model": 'path = "Qwen/Qwen3-0.6B"', "data": 'train = "/home/me/secret/rows.jsonl"', "algo": 'name = "grpo"'}
    (tmp_path / "config.toml").write_text("".join(f"[{name}]\n{line}\n" for name, line in tables.items()))
    (tmp_path / "end.json").write_text('{"status": "finished"}')
    rows = [{"step": i, "reward/total": i / 10, "policy/entropy": 1.0} for i in range(1, 31)]
    rows[9:9] = [{"step": 10, "eval/test/reward/total": 0.7}, {"step": 20, "eval/test/reward/total": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "checkpoints/rollout_000010").mkdir(parents=True)
    (tmp_path / "checkpoints/rollout_000010/manifest.json").write_text("{}")
    return tmp_path


def test_figures_of_a_run(folder):
    run = whet.Run(folder)
    assert (run.status, run.results, len(run.rows)) == ("finished", {"eval/test/reward/total": 0.5}, 32)
    assert (run.best.step, run.best.value, run.best.checkpoint.name) == (10, 0.7, "rollout_000010")
    assert run.metrics["reward/total"].count() == 30 if hasattr(run.metrics, "columns") else len(run.metrics) == 32
    assert Path(run) == folder, "what takes a folder takes a run"
    assert "finished" in repr(run) and "0.7 at step 10" in repr(run)
    with pytest.raises(ValueError, match=r"is no run's folder: it has no config\.toml"):
        whet.Run(folder / "model")


@pytest.mark.parametrize(
    ("values", "settings", "best"),
    [
        ({"eval/sft/loss": [5.7, 5.4, 9.7]}, "", ("eval/sft/loss", 1)),
        ({"eval/dpo/loss": [0.7, 0.9, 0.2], "eval/dpo/accuracy": [0.5, 0.8, 0.6]}, "", ("eval/dpo/accuracy", 1)),
        ({"eval/a/mean@1": [0.1, 0.3, 0.2], "eval/a/reward/total": [1.0, 0.0, 0.5]}, "", ("eval/a/reward/total", 0)),
        ({"eval/sft/loss": [5.7, 5.4, 9.7]}, '[checkpoint]\nbest = "eval/sft/loss"\nbest_mode = "max"\n', ("eval/sft/loss", 2)),
    ],
)
def test_the_best_evaluation_is_the_highest_reward_or_accuracy_or_else_the_lowest_loss(tmp_path, values, settings, best):
    (tmp_path / "config.toml").write_text(settings)
    rows = [{"step": step, **{name: each[step] for name, each in values.items()}} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = whet.Run(tmp_path).best
    assert (found.metric, found.step) == best and found.value == values[best[0]][best[1]]


def test_curves(folder):
    pytest.importorskip("matplotlib")
    figure = whet.Run(folder).plot()
    reward, entropy = figure.axes
    assert [line.get_label() for line in reward.get_lines()] == ["reward", "mean of 10", "eval/test/reward/total"]
    assert entropy.get_title() == "entropy (nats)" and figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="there is nothing of no/metric to draw yet"):
        plot(whet.Run(folder).rows, {"no/metric": "x"}, "run")


class Hub:
    """The hub's client, as far as an upload needs it."""

    calls: ClassVar[list] = []

    def __init__(self, token):
        self.calls.append(("token", token))

    def create_repo(self, name, *, private, exist_ok):
        self.calls.append(("create", name, private))

    def upload_folder(self, *, repo_id, folder_path, commit_message, ignore_patterns):
        self.calls.append(("folder", Path(folder_path).name))

    def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id, commit_message):
        self.calls.append(("card", Path(path_or_fileobj).read_text()))
        return f"https://hub/{repo_id}/blob/main/{path_in_repo}"


def test_an_upload_has_a_card_with_data_settings_and_figures(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert whet.Run(folder).push_to_hub("me/model", token="t") == "https://hub/me/model"
    (token, made, sent, (_, card)) = Hub.calls[-4:]
    assert (token, made, sent) == (("token", "t"), ("create", "me/model", True), ("folder", "model"))
    assert "base_model: Qwen/Qwen3-0.6B" in card and "- training: rows.jsonl" in card and 'name = "grpo"' in card
    assert "| reward/total | 0.55 | 2.55 |" in card and "| eval/test/reward/total | 0.7 | 0.5 |" in card
    assert "secret" not in card, "folders of this machine are left out"


def test_what_cannot_be_uploaded_is_told(folder, monkeypatch):
    with pytest.raises(ValueError, match="'model' is not of the form owner/name"):
        whet.Run(folder).push_to_hub("model")

    def refuse(self, *given, **more):
        raise OSError("401 Unauthorized")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    monkeypatch.setattr(Hub, "create_repo", refuse)
    with pytest.raises(ValueError, match="me/model was not uploaded: 401 Unauthorized; log in"):
        whet.Run(folder).push_to_hub("me/model")
    (folder / "model/config.json").unlink()
    (folder / "model").rmdir()
    with pytest.raises(ValueError, match="has no model yet"):
        whet.Run(folder).push_to_hub("me/model")
