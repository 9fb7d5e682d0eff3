"""Hub names: found in the cache, and what is said when they are not."""

from __future__ import annotations

import json

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

from whet.data.files import read_rows
from whet.data.hub import resolve_model_path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty hub cache, offline."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return folder


def put(cache, repo, files):
    """A repository as the hub's cache lays it out."""
    root = cache / repo
    commit = "0123456789abcdef0123456789abcdef01234567"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for name, content in files.items():
        path = root / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root / "snapshots" / commit


def line(n):
    return json.dumps({"n": n}) + "\n"


def read(path):
    return [row.values["n"] for row in read_rows(path)]


def test_a_split_is_told_by_file_name_or_folder(cache):
    put(cache, "datasets--a--flat", {"train.jsonl": line(1), "test.jsonl": line(2), "dataset_infos.json": "{}"})
    shards = {"data/train-00000-of-00002.json": line(1), "data/train-00001-of-00002.json": line(2)}
    put(cache, "datasets--a--shards", {**shards, "data/test-00000-of-00001.json": line(3), "README.md": "x"})
    put(cache, "datasets--a--folders", {"train/x.jsonl": line(1), "dev/x.jsonl": line(2)})
    put(cache, "datasets--a--unsplit", {"b.jsonl": line(2), "a.jsonl": line(1)})
    assert (read("a/flat"), read("a/flat:test")) == ([1], [2])
    assert (read("a/shards"), read("a/shards:train@[1:]"), read("a/shards:test")) == ([1, 2], [2], [3])
    assert (read("a/folders"), read("a/folders:dev")) == ([1], [2])
    assert read("a/unsplit") == [1, 2]


def test_several_configurations_have_to_be_chosen_from(cache):
    put(cache, "datasets--o--gsm", {"main/train-0.jsonl": line(1), "socratic/train-0.jsonl": line(2)})
    assert read("o/gsm:socratic/train") == [2]
    with pytest.raises(ValueError, match=r"several configurations.*o/gsm:main/train, o/gsm:socratic/train"):
        read("o/gsm:train")


def test_an_unknown_split_names_those_there_are(cache):
    put(cache, "datasets--a--flat", {"train.jsonl": line(1), "test.jsonl": line(2)})
    put(cache, "datasets--a--odd", {"test.jsonl": line(2)})
    with pytest.raises(ValueError, match="no split 'tset'; its splits are test, train"):
        read("a/flat:tset")
    with pytest.raises(ValueError, match="no split 'train'; its splits are test"):
        read("a/odd")


def test_a_local_folder_comes_before_the_hub(cache, tmp_path):
    put(cache, "datasets--a--b", {"train.jsonl": line(1)})
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.jsonl").write_text(line(7))
    assert read("a/b") == [7]


def test_offline_a_missing_data_set_names_the_command():
    with pytest.raises(ValueError, match=r"HF_HUB_OFFLINE is set.*`hf download --repo-type dataset some/data`"):
        read("some/data")


def test_a_failed_download_names_the_command_and_the_cause(monkeypatch):
    asked = []

    def unreachable(name, **options):
        asked.append(options)
        raise LocalEntryNotFoundError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ValueError, match=r"downloading it failed.*`hf download owner/model`.*no route to host"):
        resolve_model_path("owner/model")
    assert [options.get("local_files_only", False) for options in asked] == [True, False]


def test_a_download_is_used_where_the_cache_has_no_rows(cache, tmp_path, monkeypatch):
    put(cache, "datasets--a--b", {"README.md": "only this was fetched"})
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    (fetched / "train.jsonl").write_text(line(4))
    cached = huggingface_hub.snapshot_download

    def download(name, **options):
        return cached(name, **options) if options.get("local_files_only") else str(fetched)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read("a/b") == [4]


def test_models_are_folders_or_hub_names(cache, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "file").write_text("x")
    cached = put(cache, "models--owner--model", {"config.json": "{}", "model.safetensors": ""})
    assert resolve_model_path(str(tmp_path / "mine")) == tmp_path / "mine"
    assert resolve_model_path("owner/model") == cached
    for name, message in [
        ("owner/other", r"the model 'owner/other' is neither a local path.*`hf download owner/other`"),
        ("./no/such/folder", "there is no model folder"),
        ("file", "is a file"),
    ]:
        with pytest.raises(ValueError, match=message):
            resolve_model_path(name)


def test_a_model_cached_without_weights_is_not_enough(cache):
    put(cache, "models--owner--half", {"config.json": "{}"})
    with pytest.raises(ValueError, match="hf download owner/half"):
        resolve_model_path("owner/half")
