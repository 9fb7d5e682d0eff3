"""A folder to work in, with a small model."""

import pytest

from tests.e2e.tiny_run import make_files


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make_files(folder)
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """The current folder of a test, which has `model` and `train.jsonl`."""
    (tmp_path / "model").symlink_to(made / "model")
    (tmp_path / "train.jsonl").write_bytes((made / "train.jsonl").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path
