"""What a start would do, against what it does."""

import shutil

import pytest
from safetensors.torch import load_file, save_file

from tests.check.small_run import look, of, write_rows
from whet.checkpoint.config import CheckpointConfig
from whet.checkpoint.store import CheckpointStore
from whet.config import load_config
from whet.runs.supervised import train_on_data
from whet.settings.supervised import SupervisedRunConfig
from whet.types import Progress

AREAS = ("batch", "model", "tokenizer", "data", "length", "resume")


@pytest.fixture(scope="module")
def trained(whole, tmp_path_factory):
    """A supervised run of two of four steps, and its folder."""
    import os

    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        train_on_data(load_config(SupervisedRunConfig, folder / "sft.toml", ["num_steps=2", "observe.display=none"]))
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def begun(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def resume(*overrides):
    findings, _ = look(*AREAS, overrides=["observe.display=none", *overrides], file="sft.toml")
    return {status: of(findings, "resume", status) for status in ("ok", "warn", "FAIL", "skip")}


def test_an_empty_folder_is_begun(here):
    assert resume() == {"ok": ["starts afresh: there is no checkpoint in sft"], "warn": [], "FAIL": [], "skip": []}


def test_metrics_without_a_checkpoint_are_said_to_be_set_aside(begun):
    shutil.rmtree(begun / "sft/checkpoints")
    assert resume("num_steps=2")["ok"] == ["starts afresh: there is no checkpoint in sft, the metrics of an earlier start are set aside"]


def test_another_model_is_told_not_to_give_its_weights_to_a_run_that_goes_on(begun):
    shutil.copytree(begun / "model", begun / "other")
    (told,) = resume("model.path=other")["warn"]
    assert "model.path = 'other' (was 'model'; a checkpoint goes on with its own weights, and another run_dir begins with these)" in told


def test_a_checkpoint_is_gone_on_from_and_so_says_the_run(begun, capsys):
    found = resume()
    assert found["ok"] == ["goes on from sft/checkpoints/rollout_000002 at step 2 of 4 (optimizer step 2)"]
    assert found["warn"] == ["settings changed since the last start in sft: num_steps = 4 (was 2)"] and not found["FAIL"]
    train_on_data(load_config(SupervisedRunConfig, begun / "sft.toml", ["observe.display=plain"]))
    assert "resumed from sft/checkpoints/rollout_000002" in capsys.readouterr().out


def test_a_finished_run_has_nothing_left(begun):
    found = resume("num_steps=2")
    assert "at step 2 of 2" in found["warn"][0] and "nothing is left to train" in found["warn"][0] and not found["ok"]


def test_a_damaged_part_is_named(begun):
    path = begun / "sft/checkpoints/rollout_000002/optimizer.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"is damaged: optimizer.safetensors has {len(whole) - 1} bytes, not {len(whole)}" in resume()["FAIL"][0]
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "optimizer.safetensors has other contents than were written" in resume()["FAIL"][0]
    path.unlink()
    assert "optimizer.safetensors is missing" in resume()["FAIL"][0]


def test_resuming_may_be_forbidden(begun):
    assert "checkpoint.resume is false" in resume("checkpoint.resume=false")["FAIL"][0]


def test_a_checkpoint_of_another_model_or_type_fails(begun):
    (fault,) = resume("model.dtype=bfloat16")["FAIL"]
    assert "is of another model" in fault and "torch.float32" in fault
    before = begun / "sft/checkpoints/rollout_000002"
    weights = load_file(before / "weights.safetensors")
    name = sorted(weights)[0]
    del weights[name]

    def write(folder):
        shutil.copy(before / "state.json", folder)
        save_file(weights, folder / "weights.safetensors")

    CheckpointStore(begun / "sft/checkpoints", CheckpointConfig()).save(Progress(3, 3, 3), {}, {}, write)
    assert f"{name} is not in it" in resume()["FAIL"][0]


def test_other_data_fail_as_they_would_in_the_run(begun):
    rows = (begun / "talk.jsonl").read_text().splitlines()
    write_rows(begun / "talk.jsonl", rows[1:])
    assert "the saved position of source 'train' was taken with length 12, not 11" in resume()["FAIL"][0]
    with pytest.raises(ValueError, match="was taken with length 12, not 11"):
        train_on_data(load_config(SupervisedRunConfig, begun / "sft.toml", ["observe.display=none"]))


def test_a_shortened_log_fails_as_it_would_in_the_run(begun):
    log = begun / "sft/metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    assert "cannot be cut at byte" in resume()["FAIL"][0]
    with pytest.raises(ValueError, match="cannot be cut at byte"):
        train_on_data(load_config(SupervisedRunConfig, begun / "sft.toml", ["observe.display=none"]))


def test_without_a_model_or_rows_it_is_said_what_was_not_compared(begun):
    found = resume("model.path=gone")
    assert found["ok"] == ["goes on from sft/checkpoints/rollout_000002 at step 2 of ? (optimizer step 2)"]
    assert len(found["skip"]) == 2 and "its weights: not compared" in found["skip"][0] and "its place in the data" in found["skip"][1]
