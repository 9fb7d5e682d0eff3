"""One server for most of the tests."""

import pytest

from tests.serve.serve_setup import live, model_folder


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Two models of one shape."""
    folder = tmp_path_factory.mktemp("served")
    return [model_folder(folder / f"model{seed}", seed) for seed in (0, 1)]


@pytest.fixture(scope="session")
def shared(models):
    with live(models[0]) as server:
        yield server


@pytest.fixture
def server(shared):
    """The shared server, as a test wants to find it and has to leave it."""
    yield shared
    if shared.service.control.paused:
        shared.send("/continue_generation", {})
