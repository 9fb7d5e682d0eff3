import pytest

from tests.check.small_run import make_run


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """A sound run, not to be changed."""
    return make_run(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def here(whole, tmp_path, monkeypatch):
    """A copy of it, and the current folder."""
    import shutil

    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path
