"""A model for recording servers."""

import pytest

from tests.serve.serve_setup import model_folder


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """One model, in a list."""
    return [model_folder(tmp_path_factory.mktemp("recorded") / "model", 0)]
